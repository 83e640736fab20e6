"""/v1/files and /v1/batches, in OpenAI's dialect."""

from mangum import Mangum

from completions.batches_bootstrap import batches_app
from completions.handlers import ready

app = batches_app()
handler = Mangum(app, lifespan="off")
ready()
