"""What a Sourcegraph editor asks before its first completion: models, client configuration, a little GraphQL."""

from mangum import Mangum

from completions.bootstrap import sourcegraph_site_app
from completions.handlers import ready

app = sourcegraph_site_app()
handler = Mangum(app, lifespan="off")
ready()
