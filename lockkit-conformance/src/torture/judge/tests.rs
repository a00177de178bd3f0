//! Bad histories, each of which has to be found.
