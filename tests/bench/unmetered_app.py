"""What uvicorn serves when the service is measured without metering: the completions of all dialects."""

from memory_parts import memory_parts

from completions.bootstrap import every_dialects_completions_app
from completions.handlers import ready

app = every_dialects_completions_app(memory_parts())
ready()
