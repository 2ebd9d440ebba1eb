"""What every test shares."""

from offbeat.threads import spin_briefly

spin_briefly()  # as the command line does: tests run side by side
