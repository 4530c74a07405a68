"""Short background tasks over Celery: the tasks, the processes that run them, the broker."""
