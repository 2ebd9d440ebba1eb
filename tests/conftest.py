"""What every test shares."""

from hypothesis import settings

from offbeat.threads import spin_briefly

spin_briefly()  # as the command line does: tests run side by side
settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing on shared cores
settings.load_profile("untimed")
