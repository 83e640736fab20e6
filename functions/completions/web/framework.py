"""FastAPI, imported in half the time.

It describes OpenAPI in some sixty models, which pydantic builds one by one while the package loads; a function that
publishes no document never uses one. Pydantic has a setting for that, which models inherit: build at the first use.
It is set while FastAPI loads, and for nothing else.
"""

from __future__ import annotations

from pydantic import BaseModel

BaseModel.model_config["defer_build"] = True
try:
    from fastapi import FastAPI, Request, Response
    from fastapi.routing import APIRoute
finally:
    del BaseModel.model_config["defer_build"]

__all__ = ["APIRoute", "FastAPI", "Request", "Response"]
