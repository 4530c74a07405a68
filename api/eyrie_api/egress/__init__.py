"""Requests to URLs given by users: address checks against SSRF, and signatures of webhook deliveries."""
