from hypothesis import settings

# A deadline would measure how busy the machine is.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
