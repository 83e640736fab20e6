"""POST /.api/completions/code and /.api/completions/stream, in Sourcegraph's dialect."""

from mangum import Mangum

from completions.bootstrap import sourcegraph_completions_app
from completions.handlers import ready

app = sourcegraph_completions_app()
handler = Mangum(app, lifespan="off")
ready()
