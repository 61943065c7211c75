"""The one exception family. Each message is a single line: what is wrong, with which file, what to do."""


class MedusaError(Exception):
    """Base of every error that is the input's fault and not the program's; command lines print it as one line."""


class AudioError(MedusaError):
    """The input cannot be read as audio."""


class CheckpointError(MedusaError):
    """A model or heads file is missing, broken, or does not fit."""


class OptionError(MedusaError):
    """An option has a value that cannot work with this model or these files."""


class OutputError(MedusaError):
    """The result cannot be written."""
