// Storages that lose and get their memory while tensors stay on them; whoever touches one without is told why.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include <string>
#include <utility>

namespace plumb {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
inline void allow_access(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#else
// These versions can set the refusal of a storage and cannot take it back. A template's explicit instantiation may name
// the private flag; without it a released parameter would be read at address zero.
void allow_access(c10::StorageImpl& storage);
template <bool c10::StorageImpl::* Refuses>
struct Opened {
  friend void allow_access(c10::StorageImpl& storage) { storage.*Refuses = false; }
};
template struct Opened<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

// From here on tensors over the storage read and write `memory`.
inline void fill_storage(c10::StorageImpl& storage, c10::DataPtr memory, size_t bytes) {
  allow_access(storage);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

// Its memory goes, and every use of a tensor over it is an error that says `message`. It keeps its size, so that no shape
// is found wanting before.
inline void empty_storage(c10::StorageImpl& storage, std::string message) {
  storage.set_data_ptr_noswap(storage.allocator()->allocate(0));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

}  // namespace plumb
