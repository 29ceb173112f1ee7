"""An injection that is broken on purpose."""


def raises(_params):
    """Fail where a tensor should be changed."""

    def transform(_name, _tensor, _context):
        raise RuntimeError("broken on purpose")

    return transform
