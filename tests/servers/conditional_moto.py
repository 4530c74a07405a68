"""moto's S3 server with atomic conditional writes: it looks for a key and then writes it, so that of several writers at
the same moment more than one would succeed."""

import sys
import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_put_object, _one_at_a_time = S3Response.put_object, threading.RLock()


def put_object(self: S3Response) -> Any:
    """As moto's, one at a time."""
    with _one_at_a_time:
        return _put_object(self)


if __name__ == "__main__":
    S3Response.put_object = put_object  # type: ignore[method-assign]
    main(sys.argv[1:])
