"""The web console: pages rendered on the server from the values of the REST API."""
