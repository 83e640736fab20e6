"""POST /v2/completions, in Scale's dialect."""

from mangum import Mangum

from completions.bootstrap import scale_completions_app
from completions.handlers import ready

app = scale_completions_app()
handler = Mangum(app, lifespan="off")
ready()
