"""Endpoints on one machine: engine processes, gateway, routing, recorded traffic."""
