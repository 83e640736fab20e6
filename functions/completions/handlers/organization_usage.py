"""GET /v1/organization/usage/completions, /costs, /latency and /limits, in OpenAI's dialect."""

from mangum import Mangum

from completions.bootstrap import organization_app
from completions.handlers import ready

app = organization_app()
handler = Mangum(app, lifespan="off")
ready()
