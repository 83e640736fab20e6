"""POST /v1/completions and POST /completions, in OpenAI's dialect.

``app`` is what uvicorn serves in the streamed form, ``handler`` what Lambda calls in the buffered one.
"""

from mangum import Mangum

from completions.bootstrap import openai_completions_app
from completions.handlers import ready

app = openai_completions_app()
handler = Mangum(app, lifespan="off")
ready()
