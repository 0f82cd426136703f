#include "cli/record.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "cli/flags.h"
#include "cli/held.h"
#include "engine/impl.h"
#include "engine/saving.h"
#include "engine/slots.h"
#include "save/file.h"
#include "save/manifest.h"
#include "save/tensors.h"
#include "watch/road.h"
#include "watch/strike.h"

namespace plumb::cli {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kVersion = 1;

std::string numbered(const std::string& name, int64_t number, const std::string& ending) {
  const std::string digits = std::to_string(number);
  return name + "-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ending;
}

std::string text_in(const std::string& path) { return save::read_text(path, save::kLongestManifest); }

// Whole or not at all.
void write_text(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".unfinished";
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw Error("cannot write '" + unfinished + "'");
  fs::rename(unfinished, path);
}

void write_tensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<save::TensorInFile> places;
  for (const auto& [name, tensor] : tensors) {
    places.push_back({name, dtype_name(tensor.scalar_type(), name), tensor.sizes().vec()});
  }
  const std::string head = save::header_of(places, {});
  fs::remove(path);
  save::NewFile file(path);
  file.write(head.data(), head.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor there = tensor.cpu().contiguous();
    file.write(there.const_data_ptr(), there.nbytes());
  }
  file.finish();
}

at::Tensor tensor_in(const save::TensorFile& file, const std::string& name) {
  const save::TensorInFile* found = file.find(name);
  if (found == nullptr) throw Error("'" + file.path() + "' has no tensor '" + name + "'");
  const at::Tensor value = at::empty(found->shape, dtype_of(found->dtype));
  file.read(*found, 0, value.mutable_data_ptr(), value.nbytes());
  return value;
}

std::string place(int64_t step, const std::string& what, size_t number) {
  return "step " + std::to_string(step) + " " + what + " " + std::to_string(number);
}

}  // namespace

void Recorder::begin(int64_t samples, const std::vector<model::Batch>& batches, std::vector<at::Tensor> generators) {
  if (settings_.record.empty()) return;
  Kept kept{engine_.steps(), samples, 0, batches, std::move(generators)};
  for (const model::Batch& batch : batches)
    kept.bytes += static_cast<int64_t>(batch.input.nbytes() + batch.target.nbytes());
  kept_.push_back(std::move(kept));
  std::vector<int64_t> bytes;
  for (const Kept& one : kept_) bytes.push_back(one.bytes);
  for (size_t more = kept_.size() - steps_held(bytes); more > 0; --more) kept_.pop_front();
}

void Recorder::write(const std::string& error) noexcept {
  if (settings_.record.empty() || kept_.empty()) return;
  try {
    write_all(error);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "plumb: rank %d could not write its record: %s\n", engine_.world().rank(), failure.what());
  }
}

void Recorder::write_all(const std::string& error) {
  const int rank = engine_.world().rank(), ranks = engine_.world().size();
  const Kept& last = kept_.back();
  const std::string folder =
      settings_.record + "/" + numbered("step", last.step, "") + numbered("-restart", restarts_before(), "");
  fs::create_directories(folder);
  NamedTensors tensors;
  json steps = json::array();
  for (const Kept& one : kept_) {
    steps.push_back({{"step", one.step}, {"samples", one.samples}});
    for (size_t i = 0; i < one.batches.size(); ++i) {
      tensors.emplace_back(place(one.step, "input", i), one.batches[i].input);
      tensors.emplace_back(place(one.step, "target", i), one.batches[i].target);
    }
    for (size_t i = 0; i < one.generators.size(); ++i) {
      tensors.emplace_back(place(one.step, "generator", i), one.generators[i]);
    }
  }
  write_tensors(folder + "/" + numbered("inputs", rank, ".safetensors"), tensors);

  // Parameters are of the step's beginning, unless the failure met their update.
  std::string stateless;
  const Point point = road_of(engine_.world()).last().point;
  if (engine_.steps() != last.step || point == Point::update || point == Point::publish) {
    stateless = "the parameters were being updated when it failed";
  } else {
    try {
      Engine::Impl& impl = engine_.impl();
      if (!impl.saving) impl.saving = std::make_shared<Saving>(impl);
      write_text(folder + "/" + numbered("part", rank, ".json"), impl.saving->write_alone(folder, last.samples));
    } catch (const std::exception& failure) {
      stateless = failure.what();
    }
  }
  const json record = {{"version", kVersion},
                       {"rank", rank},
                       {"ranks", ranks},
                       {"micros", last.batches.size()},
                       {"generators", last.generators.size()},
                       {"step", last.step},
                       {"samples", last.samples},
                       {"steps", std::move(steps)},
                       {"vocabulary", vocabulary_},
                       {"error", error},
                       {"stateless", stateless},
                       {"settings", to_json(settings_)}};
  write_text(folder + "/" + numbered("record", rank, ".json"),
             record.dump(2, ' ', false, json::error_handler_t::replace));
}

std::string failure_in(const std::string& path) {
  const auto holds = [](const fs::path& folder) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("record-") && name.ends_with(".json")) return true;
    }
    return false;
  };
  if (holds(path)) return path;
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path, ignored)) {
    if (entry.is_directory() && holds(entry.path())) found.push_back(entry.path().string());
  }
  if (found.empty())
    throw Error("there is no record of a failure in '" + path + "'; `plumb train --record DIR` makes them");
  return *std::max_element(found.begin(), found.end(), [](const std::string& a, const std::string& b) {
    return fs::last_write_time(a) < fs::last_write_time(b);
  });
}

namespace {

Record read_record(const std::string& folder, int rank) {
  const std::string path = folder + "/" + numbered("record", rank, ".json");
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw Error("'" + path + "' is missing: rank " + std::to_string(rank) +
                " was killed, or runs on another machine whose "
                "files are not here");
  }
  Record record;
  try {
    const json text = json::parse(text_in(path));
    if (text.at("version") != kVersion) throw Error("it is of another version");
    record.rank = text.at("rank");
    record.ranks = text.at("ranks");
    record.micros = text.at("micros");
    record.step = text.at("step");
    record.samples = text.at("samples");
    record.vocabulary = text.at("vocabulary");
    record.error = text.at("error");
    record.stateless = text.at("stateless");
    for (const Flag& flag : flags(record.settings)) {
      std::visit([&](auto* value) { *value = text.at("settings").at(flag.name).get<std::decay_t<decltype(*value)>>(); },
                 flag.target);
    }
    const save::TensorFile file(folder + "/" + numbered("inputs", rank, ".safetensors"));
    for (size_t i = 0; i < static_cast<size_t>(record.micros); ++i) {
      record.batches.push_back(
          {tensor_in(file, place(record.step, "input", i)), tensor_in(file, place(record.step, "target", i))});
    }
    for (size_t i = 0; i < text.at("generators").get<size_t>(); ++i) {
      record.generators.push_back(tensor_in(file, place(record.step, "generator", i)));
    }
  } catch (const std::exception& error) {
    throw Error("'" + path + "' cannot be read: " + error.what());
  }
  if (record.rank != rank || record.ranks < 1 || record.micros < 1) throw Error("'" + path + "' contradicts itself");
  return record;
}

}  // namespace

std::vector<Record> read_records(const std::string& folder) {
  std::vector<Record> all = {read_record(folder, 0)};
  while (static_cast<int>(all.size()) < all[0].ranks) {
    const Record& one = all.emplace_back(read_record(folder, static_cast<int>(all.size())));
    if (one.ranks == all[0].ranks && one.step == all[0].step && one.micros == all[0].micros) continue;
    throw Error("the records of ranks 0 and " + std::to_string(one.rank) + " in '" + folder +
                "' are of different runs or steps");
  }
  return all;
}

void join_state(const std::string& folder, int ranks) {
  save::Manifest whole;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = folder + "/" + numbered("part", rank, ".json");
    save::Manifest part = save::Manifest::read(text_in(path), "'" + path + "'", save::Manifest::Coverage::some);
    if (rank == 0) {
      whole = std::move(part);
    } else {
      whole.join(std::move(part));
    }
  }
  const std::string text = whole.write();
  save::Manifest::read(text, "the state in '" + folder + "'");
  write_text(folder + "/" + save::kManifest, text);
}

}  // namespace plumb::cli
