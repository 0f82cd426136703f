// The standard descriptors: always there, and what is said on stdout arrives or is an error.
#pragma once

namespace plumb::cli {

// Puts /dev/null where stdin, stdout or stderr is closed: the next file opened would take that place, and what is
// printed would land in it.
void open_standard_descriptors();

// Sends what was printed so far, and keeps in mind why it could not be.
void flush_output();

// At the end: throws plumb::Error when something printed did not arrive. A reader that went away (`| head -1`) wanted no
// more, and is no error.
void check_output();

}  // namespace plumb::cli
