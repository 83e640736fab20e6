"""POST of every dialect's completions, for an environment that serves many requests at once."""

from completions.bootstrap import every_dialects_completions_app
from completions.handlers import ready

app = every_dialects_completions_app()
ready()
