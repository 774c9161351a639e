"""What can go wrong, as far as a caller may act on it. Knows no transport."""


class KvtideError(Exception):
    """A failure with a reason of kvtide.errors.v1.ErrorReason and that reason's documented metadata."""

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(KvtideError):
    """A field is missing, malformed or out of range."""

    def __init__(self, field: str, value: object, range: str) -> None:
        super().__init__(f"{field}: {value!r} is not {range}", field=field, value=value, range=range)


class InvalidToken(KvtideError):
    """A page or resume token was not issued here, or is too old."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} was not issued by this service or is too old", field=field)


class UnknownApiKey(KvtideError):
    """No API key, or an unknown one."""

    def __init__(self) -> None:
        super().__init__("no API key, or one that is not known here")


class Forbidden(KvtideError):
    """The key may not do this."""

    def __init__(self, tenant: str) -> None:
        super().__init__("this key may not use this call or act for this tenant", tenant=tenant)


class SessionNotFound(KvtideError):
    """No such session of this tenant."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"no session {session_id!r}", session_id=session_id)


class SessionExists(KvtideError):
    """A live session of another request has this id."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} exists", session_id=session_id)


class LeaseNotFound(KvtideError):
    """No such block lease of this tenant."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"no lease {lease_id!r}", lease_id=lease_id)


class IncompatibleEngine(KvtideError):
    """An engine that cannot attach."""

    def __init__(self, field: str, value: object, want: str) -> None:
        super().__init__(f"{field} is {value!r}, must be {want}", field=field, value=value, want=want)


class NoDecodeEngine(KvtideError):
    """Nothing serves this model now."""

    def __init__(self, model: str) -> None:
        super().__init__(f"no decode engine serves model {model!r}", model=model)


class StoreUnavailable(KvtideError):
    """The store does not answer."""

    def __init__(self) -> None:
        super().__init__("the store does not answer")
