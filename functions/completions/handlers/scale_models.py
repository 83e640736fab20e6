"""GET /v1/llm/model-endpoints and one of them, in Scale's first dialect."""

from mangum import Mangum

from completions.bootstrap import scale_models_app
from completions.handlers import ready

app = scale_models_app()
handler = Mangum(app, lifespan="off")
ready()
