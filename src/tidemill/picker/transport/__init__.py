"""What carries ext_proc: a lean HTTP/2 for the request path, and grpcio as the reference for it."""
