"""Tables of the fields that requests may have: their kinds and ranges, and what several paths share."""
