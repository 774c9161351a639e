"""Requests as they come from clients and as they go to each engine."""

import json
from dataclasses import dataclass
from typing import Any

from kvtide_gateway.errors import BadRequest

SESSION_FIELD = "conversation_id"
PARAMS_FIELD = "kv_transfer_params"
EXTRA_ARGS_FIELD = "vllm_xargs"
MAX_SESSION_ID = 256
MAX_MODEL = 1024
_NOT_FOR_PREFILL = ("stream_options", "min_tokens")


class Malformed(Exception):
    """No JSON object: an engine refuses it in its own words."""


@dataclass(frozen=True)
class ClientRequest:
    """A parsed body without the gateway's own field and without any transfer params of the client's."""

    body: dict[str, Any]
    session_id: str

    @property
    def model(self) -> str:
        """The model asked for; "" when it is missing or no name at all, on which an engine then has the word."""
        model = self.body.get("model")
        return model if isinstance(model, str) and len(model) <= MAX_MODEL and _is_unicode(model) else ""

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.body.get("stream"))

    @property
    def undivided(self) -> str:
        """Why neither a P→D reference nor a hold would fit the request; empty when both do."""
        body = self.body
        if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
            return "several answers from one prompt"
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return "several prompts in one request"
        if body.get("echo") or body.get("prompt_logprobs") is not None:
            return "the prompt's own logprobs need it computed on D"
        return "prompt embeddings have no fingerprint" if body.get("prompt_embeds") is not None else ""


def parse(raw: bytes, header_session: str | None) -> ClientRequest:
    """Raises Malformed for what is no JSON object, BadRequest for a session id that is none."""
    body = _json(raw)
    if not isinstance(body, dict):
        raise Malformed("the body must be a JSON object")
    body.pop(PARAMS_FIELD, None)
    if isinstance(body.get(EXTRA_ARGS_FIELD), dict):
        body[EXTRA_ARGS_FIELD].pop(PARAMS_FIELD, None)
    named = body.pop(SESSION_FIELD, None)
    return ClientRequest(body, _session_id(header_session if named is None else named))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if PARAMS_FIELD.encode() in raw:
            raise BadRequest(f"the body is not JSON: {error}") from error
        raise Malformed(f"the body is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        # Beyond a limit of this process's parser; an engine's may be another, and its params have not been removed.
        raise BadRequest(f"the body cannot be parsed: {error}") from error


def _session_id(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_SESSION_ID or not _is_unicode(value):
        raise BadRequest(f"a session id is text of 1 to {MAX_SESSION_ID} characters", param=SESSION_FIELD)
    return value


def _is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates, which no protobuf string takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def for_prefill(request: ClientRequest, params: dict[str, Any]) -> bytes:
    """P computes the prompt and one token that nobody sees."""
    body = {key: value for key, value in request.body.items() if key not in _NOT_FOR_PREFILL}
    body |= {"stream": False, "n": 1, "max_tokens": 1, PARAMS_FIELD: params}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return _dump(body)


def for_decode(request: ClientRequest, params: dict[str, Any]) -> bytes:
    """The client's own request with our params."""
    return _dump({**request.body, PARAMS_FIELD: params})


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
