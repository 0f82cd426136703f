// Storages that lose and get their memory while tensors stay on them.
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace plumb {

// A message for whoever touches an empty storage can be taken back from torch 2.13 on; before, there is none.
template <class Storage>
concept CanExplain = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

template <class Storage>
void fill_storage(Storage& storage, size_t bytes) {
  if constexpr (CanExplain<Storage>) storage.clear_data_ptr_access_error_msg_();
  storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
  storage.set_nbytes(bytes);
}

// Where the message can be given, the storage keeps its size, so that no shape is found wanting before.
template <class Storage>
void empty_storage(Storage& storage, const std::string& message, bool keeps_size = false) {
  const size_t bytes = CanExplain<Storage> && keeps_size ? storage.nbytes() : 0;
  storage.set_data_ptr_noswap(storage.allocator()->allocate(0));
  storage.set_nbytes(size_t{0});
  if constexpr (CanExplain<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  storage.set_nbytes(bytes);
}

}  // namespace plumb
