#!/bin/sh
# The streamed form: Lambda Web Adapter starts this in place of the runtime's own loop and talks HTTP to uvicorn.
export PYTHONPATH="${LAMBDA_TASK_ROOT}:${LAMBDA_RUNTIME_DIR:-}${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m uvicorn "${APP_MODULE:?run.sh: APP_MODULE is not set; it names the ASGI app, as module:name}" \
  --host 127.0.0.1 --port "${AWS_LWA_PORT:-8080}" --no-access-log --no-server-header --log-level warning
