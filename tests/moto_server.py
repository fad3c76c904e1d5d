"""Serves S3 by moto, with an empty bucket called `bucket`, on a port that it prints.

It runs with the Python of moto's own environment. S3 checks a condition and writes in one step, but
moto in two. So this server answers one request after the other.
"""

import io
import threading
from urllib.request import Request, urlopen

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Silent(WSGIRequestHandler):
    def log_request(self, *_):
        pass


def one_at_a_time(application):
    """Wraps a WSGI application so that it answers one request at a time.

    The bodies of requests are received in parallel, before their turn comes.
    """
    turn = threading.Lock()

    def answer(environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with turn:
            return list(application(environ, start_response))

    return answer


application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
urlopen(Request(f"http://127.0.0.1:{server.server_port}/bucket", method="PUT")).close()
print(server.server_port, flush=True)
threading.Event().wait()
