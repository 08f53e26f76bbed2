"""What was measured on this machine: versioned JSON, one section per package.

Pure data: no torch, no hardware, no measuring. Whoever measures (`dovetail tune`) makes a `Profile` and saves it;
whoever chooses (`dovetail.coll`) loads it and asks. A profile of another machine, driver or version is named and
ignored, and the shipped default serves instead.
"""

from dovetail.profile.choice import Choice, choose, quoted
from dovetail.profile.profile import SCHEMA, Key, Profile, current, default, load, save

__all__ = ["SCHEMA", "Choice", "Key", "Profile", "choose", "current", "default", "load", "quoted", "save"]
