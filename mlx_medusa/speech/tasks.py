"""What can be asked of each family of models."""

WHISPER = ("transcribe", "translate")

QUERY = "Please transcribe this speech."
HEADS_QUERY = "Transcribe the speech"  # what the public heads of MERaLiON-2-3B were trained with
MERALION = {  # task -> instruction; {}: the user's own
    "transcribe": QUERY,
    "singlish": "Please transcribe this Singlish speech.",
    "translate-zh": "Can you please translate this speech into written Chinese?",
    "translate-id": "Can you please translate this speech into written Indonesian?",
    "translate-ms": "Can you please translate this speech into written Malay?",
    "translate-ta": "Can you please translate this speech into written Tamil?",
    "question": "Based on the audio, answer the following question: {}",
    "summarize": "Please summarize this spoken dialogue.",
    "instruction": "{}",
}

ALL = tuple(dict.fromkeys((*WHISPER, *MERALION)))
