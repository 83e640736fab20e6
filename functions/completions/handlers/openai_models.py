"""GET /v1/models and GET /v1/models/{id}, in OpenAI's dialect."""

from mangum import Mangum

from completions.bootstrap import openai_models_app
from completions.handlers import ready

app = openai_models_app()
handler = Mangum(app, lifespan="off")
ready()
