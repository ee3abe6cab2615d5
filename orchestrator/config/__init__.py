"""Every key there is, as frozen dataclasses, and how YAML and --set become them."""
