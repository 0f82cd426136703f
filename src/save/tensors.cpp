#include "save/tensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "plumb/error.h"
#include "save/json.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own bound

std::string in_brackets(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

uint64_t offset_of(const Json& value, const std::string& what) {
  const int64_t offset = value.integer(what);
  if (offset < 0) throw Error(what + " is negative");
  return static_cast<uint64_t>(offset);
}

TensorInFile read_tensor(const std::string& name, const Json& json, const std::string& path) {
  const std::string what = "tensor '" + name + "' of '" + path + "'";
  TensorInFile tensor;
  tensor.name = name;
  if (json.object(what).size() != 3) throw Error(what + " has other fields than dtype, shape and data_offsets");
  tensor.dtype = json.at("dtype", what).text("the dtype of " + what);
  for (const Json& length : json.at("shape", what).array("the shape of " + what)) {
    tensor.shape.push_back(length.integer("a length of " + what));
  }
  const auto& offsets = json.at("data_offsets", what).array("data_offsets of " + what);
  if (offsets.size() != 2) throw Error("data_offsets of " + what + " are not two numbers");
  tensor.begin = offset_of(offsets[0], "the begin of " + what);
  tensor.end = offset_of(offsets[1], "the end of " + what);
  const uint64_t each = element_bytes(tensor.dtype);
  if (each == 0) throw Error(what + " has the unknown dtype '" + tensor.dtype + "'");
  const uint64_t count = elements(tensor.shape, what);
  uint64_t expected = 0;
  if (__builtin_mul_overflow(count, each, &expected) || tensor.end < tensor.begin ||
      tensor.end - tensor.begin != expected) {
    throw Error(what + " is " + tensor.dtype + " " + in_brackets(tensor.shape) + ", and its bytes are [" +
                std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + ")");
  }
  return tensor;
}

}  // namespace

uint64_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, uint64_t> known = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},  {"I32", 4}, {"I16", 2},     {"I8", 1},
      {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  const auto found = known.find(dtype);
  return found == known.end() ? 0 : found->second;
}

uint64_t elements(const std::vector<int64_t>& shape, const std::string& what) {
  uint64_t count = 1;
  for (const int64_t length : shape) {
    if (length < 0 || __builtin_mul_overflow(count, static_cast<uint64_t>(length), &count) ||
        count > (uint64_t{1} << 60)) {
      throw Error(what + " has the impossible shape " + in_brackets(shape));
    }
  }
  return count;
}

TensorFile::TensorFile(const std::string& path) : file_(path) {
  const std::string what = "'" + path + "'";
  if (file_.bytes() < 8) throw Error(what + " has " + std::to_string(file_.bytes()) + " bytes: too short for a header");
  std::string head(8, '\0');
  file_.read(0, head.data(), 8);
  uint64_t length = 0;
  std::memcpy(&length, head.data(), 8);
  if (length > kLongestHeader || length > file_.bytes() - 8) {
    throw Error(what + " says that its header has " + std::to_string(length) + " bytes, and the file has " +
                std::to_string(file_.bytes()));
  }
  head.resize(8 + length);
  file_.read(8, head.data() + 8, length);
  header_checksum_ = xxh3(head.data(), head.size());
  data_ = 8 + length;
  const std::string_view text = std::string_view(head).substr(8);
  if (text.empty() || text.front() != '{') throw Error("the header of " + what + " does not begin with '{'");
  const Json header = Json::parse(text, "the header of " + what);
  for (const auto& [name, value] : header.object("the header of " + what)) {
    if (name == kMetadata) {
      for (const auto& [key, text] : value.object("the metadata of " + what)) metadata_[key] = text.text(what);
    } else {
      tensors_.push_back(read_tensor(name, value, path));
    }
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorInFile& a, const TensorInFile& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t end = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].begin != end) {
      throw Error("tensor '" + tensors_[i].name + "' of " + what + " begins at byte " +
                  std::to_string(tensors_[i].begin) + "; expected " + std::to_string(end) +
                  ": tensors lie one behind the other");
    }
    end = tensors_[i].end;
    by_name_[tensors_[i].name] = i;
  }
  if (file_.bytes() - data_ != end) {
    throw Error(what + " has " + std::to_string(file_.bytes() - data_) + " bytes of tensors; its header says " +
                std::to_string(end));
  }
}

const TensorInFile* TensorFile::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

void TensorFile::read(const TensorInFile& tensor, uint64_t offset, void* data, size_t bytes) const {
  file_.read(data_ + tensor.begin + offset, data, bytes);
}

std::string header_of(std::vector<TensorInFile>& tensors, const std::map<std::string, std::string>& metadata) {
  Json::Object members;
  if (!metadata.empty()) {
    Json::Object words;
    for (const auto& [key, value] : metadata) words.emplace_back(key, value);
    members.emplace_back(kMetadata, std::move(words));
  }
  uint64_t end = 0;
  std::set<std::string> names;
  for (TensorInFile& tensor : tensors) {
    if (tensor.name == kMetadata) {
      throw Error("a tensor is called '" + tensor.name + "', which files of safetensors call something else");
    }
    if (!names.insert(tensor.name).second) throw Error("two tensors of one file are called '" + tensor.name + "'");
    tensor.begin = end;
    end += elements(tensor.shape, "tensor '" + tensor.name + "'") * element_bytes(tensor.dtype);
    tensor.end = end;
    Json::Array shape(tensor.shape.begin(), tensor.shape.end());
    members.emplace_back(tensor.name, Json::Object{{"dtype", tensor.dtype},
                                                   {"shape", std::move(shape)},
                                                   {"data_offsets", Json::Array{static_cast<int64_t>(tensor.begin),
                                                                                static_cast<int64_t>(tensor.end)}}});
  }
  std::string text = Json(std::move(members)).write();
  text.append((8 - text.size() % 8) % 8, ' ');  // the tensors begin at a multiple of 8
  std::string head(8, '\0');
  const uint64_t length = text.size();
  std::memcpy(head.data(), &length, 8);
  return head + text;
}

}  // namespace plumb::save
