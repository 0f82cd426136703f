#include "save/manifest.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <set>

#include "plumb/error.h"
#include "save/tensors.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

constexpr const char* kFormat = "plumb checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kTail = ",\n \"xxh3\": \"";  // and 16 digits, and "\n}\n": the checksum of all before it

constexpr std::array<const char*, 6> kKinds = {"weight", "optimizer", "optimizer value",
                                               "buffer", "generator", "extra"};

Json numbers(const std::vector<int64_t>& values) { return Json::Array(values.begin(), values.end()); }

std::vector<int64_t> numbers(const Json& json, const std::string& what) {
  std::vector<int64_t> values;
  for (const Json& value : json.array(what)) values.push_back(value.integer(what));
  return values;
}

int64_t not_negative(const Json& json, const std::string& what) {
  const int64_t value = json.integer(what);
  if (value < 0) throw Error(what + " is negative");
  return value;
}

// Only these fields, each of which may be asked for.
void check_fields(const Json& json, const std::set<std::string>& known, const std::string& what) {
  for (const auto& [key, value] : json.object(what)) {
    if (!known.contains(key)) throw Error(what + " has the unknown field '" + key + "'");
  }
}

// A plain name of this folder.
void check_name(const std::string& name, const std::string& what) {
  const bool plain = !name.empty() && name.size() < 200 && name[0] != '.' &&
                     std::all_of(
                         name.begin(), name.end(),
                         [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '.' || c == '_'; });
  if (!plain)
    throw Error(what + " is called '" + name + "', which is no plain name of a file in the checkpoint's folder");
}

void check_strides(const SavedTensor& tensor, const std::string& what) {
  if (tensor.strides.empty()) return;
  bool good = tensor.strides.size() == tensor.shape.size();
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (size_t i = 0; good && i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] != 1) axes.emplace_back(tensor.strides[i], tensor.shape[i]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t expected = 1;
  for (const auto& [stride, length] : axes) {
    good = good && stride == expected;
    expected *= length;
  }
  if (!good) throw Error(what + " has strides that do not cover its memory once");
}

void check_parts(const SavedTensor& tensor, size_t files, const std::string& what) {
  int64_t end = 0;
  for (const Part& part : tensor.parts) {
    if (part.file < 0 || static_cast<size_t>(part.file) >= files)
      throw Error(what + " names a file that is not listed");
    if (part.begin != end || part.end < part.begin) {
      throw Error(what + " has elements [" + std::to_string(part.begin) + ", " + std::to_string(part.end) +
                  ") behind element " + std::to_string(end) + ": parts overlap or leave a hole");
    }
    end = part.end;
  }
  if (tensor.parts.empty() || end != tensor.numel()) {
    throw Error(what + " has " + std::to_string(end) + " of its " + std::to_string(tensor.numel()) + " elements");
  }
}

SavedTensor read_tensor(const Json& json, size_t files, const std::string& where, Manifest::Coverage coverage) {
  const std::string some = "a tensor of " + where;
  check_fields(json, {"kind", "name", "key", "dtype", "shape", "strides", "sharded", "parts"}, some);
  SavedTensor tensor;
  tensor.name = json.at("name", some).text("the name of " + some);
  const std::string what = "tensor '" + tensor.name + "' of " + where;
  const std::string& kind = json.at("kind", what).text("the kind of " + what);
  const auto* found = std::find(kKinds.begin(), kKinds.end(), kind);
  if (found == kKinds.end()) throw Error(what + " is of the unknown kind '" + kind + "'");
  tensor.kind = static_cast<Kind>(found - kKinds.begin());
  tensor.key = json.at("key", what).text("the key of " + what);
  tensor.dtype = json.at("dtype", what).text("the dtype of " + what);
  if (element_bytes(tensor.dtype) == 0) throw Error(what + " has the unknown dtype '" + tensor.dtype + "'");
  tensor.shape = numbers(json.at("shape", what), "the shape of " + what);
  elements(tensor.shape, what);
  tensor.strides = numbers(json.at("strides", what), "the strides of " + what);
  tensor.sharded = json.at("sharded", what).boolean("'sharded' of " + what);
  for (const Json& one : json.at("parts", what).array("the parts of " + what)) {
    check_fields(one, {"file", "begin", "end", "xxh3"}, "a part of " + what);
    Part& part = tensor.parts.emplace_back();
    part.file = not_negative(one.at("file", what), "the file of " + what);
    part.begin = not_negative(one.at("begin", what), "a begin of " + what);
    part.end = not_negative(one.at("end", what), "an end of " + what);
    part.checksum = from_hex(one.at("xxh3", what).text(what), "the checksum of " + what);
  }
  check_strides(tensor, what);
  if (coverage == Manifest::Coverage::whole) check_parts(tensor, files, what);
  return tensor;
}

}  // namespace

std::string to_string(Kind kind) { return kKinds[static_cast<size_t>(kind)]; }

std::string SavedTensor::in_file() const {
  // As everybody who reads models expects it. One name is the format's own.
  if ((kind == Kind::weight || kind == Kind::buffer) && name != kMetadata) return name;
  return to_string(kind) + ":" + name + "/" + key;
}

std::string SavedTensor::title() const {
  return to_string(kind) + " '" + name + "'" + (key.empty() ? "" : " (" + key + ")");
}

int64_t SavedTensor::numel() const { return static_cast<int64_t>(elements(shape, title())); }

const Json& Manifest::engine_field(const std::string& key) const {
  for (const auto& [name, value] : engine) {
    if (name == key) return value;
  }
  throw Error("the manifest says nothing of '" + key + "'");
}

const SavedTensor* Manifest::find(Kind kind, const std::string& name, const std::string& key) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const SavedTensor& tensor) {
    return tensor.kind == kind && tensor.name == name && tensor.key == key;
  });
  return found == tensors.end() ? nullptr : &*found;
}

std::string Manifest::write() const {
  Json::Array listed, all;
  for (const SavedFile& file : files) {
    listed.push_back(Json::Object{
        {"name", file.name}, {"bytes", static_cast<int64_t>(file.bytes)}, {"header_xxh3", hex(file.header)}});
  }
  for (const SavedTensor& tensor : tensors) {
    Json::Array parts;
    for (const Part& part : tensor.parts) {
      parts.push_back(
          Json::Object{{"file", part.file}, {"begin", part.begin}, {"end", part.end}, {"xxh3", hex(part.checksum)}});
    }
    all.push_back(Json::Object{{"kind", to_string(tensor.kind)},
                               {"name", tensor.name},
                               {"key", tensor.key},
                               {"dtype", tensor.dtype},
                               {"shape", numbers(tensor.shape)},
                               {"strides", numbers(tensor.strides)},
                               {"sharded", tensor.sharded},
                               {"parts", std::move(parts)}});
  }
  std::string text = Json(Json::Object{{"format", kFormat},
                                       {"version", kVersion},
                                       {"step", step},
                                       {"samples", samples},
                                       {"ranks", ranks},
                                       {"provenance", provenance},
                                       {"engine", engine},
                                       {"files", std::move(listed)},
                                       {"tensors", std::move(all)}})
                         .write(2);
  text.resize(text.size() - 2);  // the end of the line, and the object's
  return text + kTail + hex(xxh3(text.data(), text.size())) + "\"\n}\n";
}

Manifest Manifest::read(const std::string& text, const std::string& where, Coverage coverage) {
  const std::string tail = kTail;
  const size_t length = tail.size() + 16 + std::string("\"\n}\n").size();
  if (text.size() < length || text.compare(text.size() - length, tail.size(), tail) != 0 ||
      !text.ends_with("\"\n}\n")) {
    throw Error(where + " does not end with its checksum: it was cut off, or is no manifest of a checkpoint");
  }
  const size_t body = text.size() - length;
  const uint64_t said = from_hex(text.substr(body + tail.size(), 16), "the checksum of " + where);
  if (const uint64_t found = xxh3(text.data(), body); found != said) {
    throw Error(where + " was changed: its checksum is " + hex(found) + "; it says " + hex(said));
  }
  const Json json = Json::parse(text, where);
  check_fields(json,
               {"format", "version", "step", "samples", "ranks", "provenance", "engine", "files", "tensors", "xxh3"},
               where);
  if (json.at("format", where).text("the format of " + where) != kFormat) throw Error(where + " is of no checkpoint");
  if (const int64_t version = json.at("version", where).integer("the version of " + where); version != kVersion) {
    throw Error(where + " is of format version " + std::to_string(version) + "; this program reads version " +
                std::to_string(kVersion));
  }
  Manifest manifest;
  manifest.step = not_negative(json.at("step", where), "the step of " + where);
  manifest.samples = not_negative(json.at("samples", where), "the samples of " + where);
  manifest.ranks = not_negative(json.at("ranks", where), "the ranks of " + where);
  manifest.provenance = json.at("provenance", where).object("the provenance of " + where);
  manifest.engine = json.at("engine", where).object("'engine' of " + where);
  std::set<std::string> names;
  for (const Json& one : json.at("files", where).array("the files of " + where)) {
    check_fields(one, {"name", "bytes", "header_xxh3"}, "a file of " + where);
    SavedFile& file = manifest.files.emplace_back();
    file.name = one.at("name", where).text("the name of a file of " + where);
    check_name(file.name, "a file of " + where);
    if (!names.insert(file.name).second) throw Error("file '" + file.name + "' of " + where + " stands twice");
    file.bytes = static_cast<uint64_t>(not_negative(one.at("bytes", where), "the length of '" + file.name + "'"));
    file.header = from_hex(one.at("header_xxh3", where).text(where), "a header's checksum of " + where);
  }
  std::set<std::string> titles;
  for (const Json& one : json.at("tensors", where).array("the tensors of " + where)) {
    const SavedTensor& tensor = manifest.tensors.emplace_back(read_tensor(one, manifest.files.size(), where, coverage));
    if (!titles.insert(tensor.title()).second) throw Error(tensor.title() + " of " + where + " stands twice");
  }
  return manifest;
}

void Manifest::join(Manifest other) {
  const auto shift = static_cast<int64_t>(files.size());
  files.insert(files.end(), other.files.begin(), other.files.end());
  std::map<std::string, size_t> known;
  for (size_t i = 0; i < tensors.size(); ++i) known[tensors[i].title()] = i;
  for (SavedTensor& theirs : other.tensors) {
    for (Part& part : theirs.parts) part.file += shift;
    const auto found = known.find(theirs.title());
    if (found == known.end()) {
      tensors.push_back(std::move(theirs));
      continue;
    }
    auto& parts = tensors[found->second].parts;
    parts.insert(parts.end(), theirs.parts.begin(), theirs.parts.end());
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  }
}

}  // namespace plumb::save
