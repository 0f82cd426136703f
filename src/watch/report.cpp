// Reports as text for the store and as sentences for people.
#include "watch/report.h"

#include <sstream>

namespace plumb {

std::string Report::encode() const {
  std::ostringstream out;
  out << static_cast<int>(state) << ' ' << beat << ' ';
  for (const int64_t count : issued) out << count << ' ';
  out << static_cast<int64_t>(last.point) << ' ' << last.step << ' ' << last.pass << ' ' << last.index << ' '
      << static_cast<int64_t>(last.beside) << ' ';
  out << wait << ' ' << ticket.group << ' ' << ticket.number << ' ' << ticket.circle << ' ' << ticket.what << ' '
      << static_cast<int>(where.kind) << ' ' << where.step << ' ' << where.pass << ' ' << origin << ' '
      << where.detail.size() << '\n'
      << where.detail << message;
  return out.str();
}

Report Report::decode(const std::string& text) {
  Report report;
  std::istringstream in(text);
  int state = 0;
  int kind = 0;
  size_t detail = 0;
  in >> state >> report.beat;
  for (int64_t& count : report.issued) in >> count;
  int64_t point = 0, beside = 0;
  in >> point >> report.last.step >> report.last.pass >> report.last.index >> beside;
  report.last.point = static_cast<Point>(point);
  report.last.beside = static_cast<Point>(beside);
  in >> report.wait >> report.ticket.group >> report.ticket.number >> report.ticket.circle >> report.ticket.what >>
      kind >> report.where.step >> report.where.pass >> report.origin >> detail;
  report.state = static_cast<State>(state);
  report.where.kind = static_cast<Where::Kind>(kind);
  const size_t body = text.find('\n');
  if (in && body != std::string::npos && body + 1 + detail <= text.size()) {
    report.where.detail = text.substr(body + 1, detail);
    report.message = text.substr(body + 1 + detail);
  }
  return report;
}

std::string backwards(int64_t count) { return std::to_string(count) + (count == 1 ? " backward" : " backwards"); }

std::string describe(const Where& where) {
  std::string text;
  switch (where.kind) {
    case Where::Kind::setup:
      text = "the set-up";
      break;
    case Where::Kind::backward:
      text = "backward " + std::to_string(where.pass) + " of step " + std::to_string(where.step);
      break;
    case Where::Kind::step:
      text = "step() number " + std::to_string(where.step) + " after " + backwards(where.pass);
      break;
    case Where::Kind::rebuild:
      text = "the rebuild of the buckets after step " + std::to_string(where.step);
      break;
  }
  return where.detail.empty() ? text : text + " (" + where.detail + ")";
}

std::string describe(const Report& report) {
  switch (report.state) {
    case Report::State::waiting:
      return "waits in " + describe(report.where);
    case Report::State::failed:
      return "failed: " + without_prefix(report.message);
    case Report::State::left:
      return "left the world";
    case Report::State::running:
      break;
  }
  const std::string last = describe(report.last);
  return "runs outside any collective" + (last.empty() ? "" : ", last seen " + last);
}

std::string without_prefix(const std::string& what) {
  constexpr const char* prefix = "plumb: ";
  return what.rfind(prefix, 0) == 0 ? what.substr(7) : what;
}

}  // namespace plumb
