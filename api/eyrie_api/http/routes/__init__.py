"""HTTP routes by subject. Handlers parse the request, call the control plane and render the response.

The docstring of a handler is the operation's description in the OpenAPI document.
"""
