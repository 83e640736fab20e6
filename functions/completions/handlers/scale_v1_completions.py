"""POST /v1/llm/completions-sync and -stream, in Scale's first dialect."""

from mangum import Mangum

from completions.bootstrap import scale_v1_completions_app
from completions.handlers import ready

app = scale_v1_completions_app()
handler = Mangum(app, lifespan="off")
ready()
