# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for llama.cpp's server tests: they ask for the OpenAI routes without /v1, an alias that llama-server has and this server does not."""
import requests

_send = requests.Session.request
_ALIASES = ("/chat/completions", "/models", "/responses")


def _SendPrefixed(self, method, url, *args, **kwargs):
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if slash + path in _ALIASES:
        url = f"{scheme}://{host}/v1/{path}"
    return _send(self, method, url, *args, **kwargs)


requests.Session.request = _SendPrefixed
