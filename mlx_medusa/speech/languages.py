"""The languages of Whisper: code -> English name, as in openai/whisper's tokenizer (MIT licence)."""

_NAMES = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese, tr turkish,
pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi, fi finnish, vi vietnamese,
he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian,
th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian, kn kannada, et estonian,
mk macedonian, br breton, eu basque, is icelandic, hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh,
sq albanian, sw swahili, gl galician, mr marathi, pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali,
af afrikaans, oc occitan, ka georgian, be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao,
uz uzbek, fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish,
my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""
_ALIASES = """
my burmese, ca valencian, nl flemish, ht haitian, lb letzeburgesch, ps pushto, pa panjabi, ro moldavian, ro moldovan,
si sinhalese, es castilian, zh mandarin
"""


def _pairs(table: str) -> list[tuple[str, str]]:
    return [tuple(entry.split(maxsplit=1)) for entry in table.replace("\n", " ").split(",")]  # type: ignore[misc]


LANGUAGES = dict(_pairs(_NAMES))
_CODES = {name: code for code, name in _pairs(_NAMES) + _pairs(_ALIASES)}


def language_code(language: str) -> str | None:
    """The code of a language given by code or English name, in any case; None if Whisper does not know it."""
    language = language.strip().lower()
    return language if language in LANGUAGES else _CODES.get(language)
