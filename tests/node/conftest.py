from tests.node.running import home, new_job

__all__ = ["home", "new_job"]
