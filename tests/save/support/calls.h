// Every system call of a save, counted, made to fail, made the last one of the process; and what would be lost if the
// machine stopped. The functions themselves are defined in this program, before the C library's.
#pragma once

#include <functional>
#include <string>

namespace plumb::test::calls {

enum class Fault { none, kill, error, short_write };

// From now on calls under `root` are counted, and the `number`th (from 1) ends the process, fails with `error`, or writes
// one byte less than it was asked to. `whose`: of which files and folders, where others' are not counted; removals are of the root.
using Whose = std::function<bool(const std::string& path)>;
void watch(const std::string& root, Fault fault = Fault::none, int number = 0, int error = 0, Whose whose = {});
// Whether the call that was to fail has come.
bool struck();
// No more; how many there were.
int stop();
// What was done before it was safe: a folder renamed whose files or names are not on the disk, nor the names of the new
// folders above it; an old checkpoint removed before the new one's name is. Empty: nothing.
std::string unsafe();
// The number of the first call that waited for the bytes of a file; 0: there was none.
int first_flush();
// Files and folders that are not on the disk.
std::string not_synced();

}  // namespace plumb::test::calls
