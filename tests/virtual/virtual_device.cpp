// A virtual accelerator on host memory, for tests: see __init__.py for what it offers.
//
// Parts, in the order of this file:
//   Python        the few functions of Python's C interface that are needed, found in the running process
//   State         streams, events, blocks of memory, what ran and what is to run; one mutex, `mu`, held for short times only
//   Checker       who touched which bytes, and whether a wait orders it (vector clocks; everything is known when an operation is enqueued)
//   Scheduler     runs operations when somebody waits; one thread at a time (`running_mu`), never with `mu` or Python's lock held
//   Memory        device blocks cached by stream, pinned host blocks
//   Guard, hooks, generator     what torch asks of an accelerator
//   Operators     one boxed fallback: shapes from meta tensors, the work later by the CPU kernel on CPU tensors over the same memory
//   Observer      CPU operators that touch pinned memory
//   Control       what __init__.py calls

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

namespace at::autocast {  // from ATen/autocast_mode.h, which costs seconds to compile
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast


namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr auto kVirtual = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------------------------------------------------------- Python

using Py = void*;

template <typename F>
F python(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

struct PythonApi {
  int (*is_initialized)() = python<int (*)()>("Py_IsInitialized");
  int (*gil_check)() = python<int (*)()>("PyGILState_Check");
  int (*gil_ensure)() = python<int (*)()>("PyGILState_Ensure");
  void (*gil_release)(int) = python<void (*)(int)>("PyGILState_Release");
  Py (*save_thread)() = python<Py (*)()>("PyEval_SaveThread");
  void (*restore_thread)(Py) = python<void (*)(Py)>("PyEval_RestoreThread");
  Py (*get_frame)() = python<Py (*)()>("PyEval_GetFrame");  // borrowed
  Py (*frame_back)(Py) = python<Py (*)(Py)>("PyFrame_GetBack");
  Py (*frame_code)(Py) = python<Py (*)(Py)>("PyFrame_GetCode");
  int (*frame_line)(Py) = python<int (*)(Py)>("PyFrame_GetLineNumber");
  void (*decref)(Py) = python<void (*)(Py)>("Py_DecRef");
  void (*incref)(Py) = python<void (*)(Py)>("Py_IncRef");
  Py (*getattr)(Py, const char*) = python<Py (*)(Py, const char*)>("PyObject_GetAttrString");
  const char* (*utf8)(Py) = python<const char* (*)(Py)>("PyUnicode_AsUTF8");
};

PythonApi& py() {
  static PythonApi api;
  return api;
}

std::atomic<bool> python_alive{true};  // false from exit on: no callbacks, no stacks

// Gives Python's lock back while this thread waits or runs operations.
struct WithoutGil {
  Py state = nullptr;
  WithoutGil() {
    if (python_alive && py().is_initialized() && py().gil_check()) state = py().save_thread();
  }
  ~WithoutGil() {
    if (state) py().restore_thread(state);
  }
};

struct Code {  // a Python function: what a stack entry names
  std::string file, function;
  bool library = false;  // of torch or of this package
};
using PyStack = std::vector<std::pair<const Code*, int>>;

std::string stack_text(const PyStack& stack) {
  std::string text;
  for (auto& [code, line] : stack) {
    if (!text.empty()) text += "\n";
    text += code->file + ":" + std::to_string(line) + " " + code->function;
  }
  return text;
}

thread_local std::vector<std::string> backward_nodes;  // the autograd nodes that this thread runs now
thread_local bool executing = false;                   // this thread runs an enqueued operation

// The Python frames that are not torch's, innermost first. Code objects are kept for good: their number is that of the functions.
PyStack capture_stack(size_t depth) {
  static std::mutex code_mu;
  static std::unordered_map<Py, std::unique_ptr<Code>> codes;
  PyStack result;
  if (!python_alive || !py().is_initialized()) return result;
  int gil = py().gil_ensure();
  Py frame = py().get_frame();
  if (frame) py().incref(frame);
  while (frame && result.size() < depth) {
    Py code = py().frame_code(frame);
    const Code* known = nullptr;
    {
      std::lock_guard<std::mutex> lock(code_mu);
      auto& entry = codes[code];
      if (!entry) {
        py().incref(code);
        entry = std::make_unique<Code>();
        Py file = py().getattr(code, "co_filename");
        Py name = py().getattr(code, "co_name");
        entry->file = py().utf8(file);
        entry->function = py().utf8(name);
        py().decref(file);
        py().decref(name);
        auto& f = entry->file;
        auto in = [&](const char* part) { return f.find(part) != std::string::npos; };
        entry->library = f[0] == '<' || in("-packages/torch/") || in("/virtual/__init__.py") || in("/tests/ranks.py") || (in("/lib/python3") && !in("-packages/onefold/"));
      }
      known = entry.get();
    }
    if (!known->library) result.emplace_back(known, py().frame_line(frame));
    Py back = py().frame_back(frame);
    py().decref(code);
    py().decref(frame);
    frame = back;
  }
  if (frame) py().decref(frame);
  py().gil_release(gil);
  return result;
}

// ---------------------------------------------------------------------------------------------------------------- State

using Clock = std::vector<uint64_t>;  // by stream: the last operation of it that is known to have happened before

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t at_clock(const Clock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

struct Operation {  // what a report says about an operation
  std::string name, stream;
  PyStack stack;
  std::string backward;
};
using OperationPtr = std::shared_ptr<const Operation>;

struct EventState {  // one recording of an event
  int stream = 0;
  uint64_t seq = 0;
  Clock clock;
  double time = 0;  // milliseconds, when it ran
};

struct HostBlock {
  char* data = nullptr;
  size_t size = 0;
  int64_t pending = 0;  // enqueued operations that use it
  bool free = false;
};

struct Item {
  enum Kind { OPERATION, WAIT, RECORD } kind = OPERATION;
  uint64_t seq = 0;
  OperationPtr info;
  std::function<void()> run;
  int64_t ready = -1;  // handle of a Python function to ask, or -1
  std::shared_ptr<EventState> event;
  std::vector<HostBlock*> host_blocks;
  std::vector<std::pair<char*, size_t>> poison;  // to be filled when this has run
};

struct StreamState {
  int index = 0;
  DeviceIndex device = 0;
  int64_t id = 0;
  std::string name;
  std::deque<std::shared_ptr<Item>> queue;
  uint64_t enqueued = 0, done = 0;
  uint64_t last_operation = 0;  // leaving out waits and events
  Clock clock;
  uint64_t host_version = 0;
};

struct Block {
  char* data = nullptr;
  size_t size = 0;       // of the memory
  size_t allocated = 0;  // given out: rounded to 512 bytes; 0 while free
  DeviceIndex device = 0;
  int stream = 0;
  uint64_t generation = 0;
  std::set<int> recorded;                             // streams of record_stream
  std::vector<std::pair<int, uint64_t>> in_use;       // after free: streams that have to get there first
};

struct Access {
  int stream = -1;
  uint64_t seq = 0;
  OperationPtr info;
  uint64_t generation = 0;
  explicit operator bool() const { return stream >= 0; }
};

struct Segment {  // bytes from its key in the map up to `end`
  uintptr_t end = 0;
  Access allocation, write;
  std::vector<Access> reads;  // since the write, the last of each stream
};

struct Violation {
  std::string first_kind, second_kind;
  Operation first, second;
  bool reused = false;
  size_t bytes = 0;
  int64_t times = 1;
};

struct Synchronization {
  std::string name, stack, backward;
  int64_t thread = 0;  // the system's number of it
};

enum Strategy { LAZY, RANDOM, AHEAD, STARVE };

struct State {
  std::mutex mu;
  std::mutex running_mu;
  int devices = 4;
  bool check = true, poison = true, stacks = true, immediate = false;
  double timeout = 120;
  uint64_t seed = 0;
  std::mt19937_64 dice{0};
  Strategy strategy = LAZY;
  int favourite = 0;
  std::vector<std::unique_ptr<StreamState>> streams;
  std::vector<std::vector<int>> pools;  // by device: streams of the pool
  std::vector<size_t> next_of_pool;
  std::vector<std::string> errors;
  std::atomic<uint64_t> progress{0};
  uint64_t executed = 0;
  std::thread background;
  std::atomic<bool> background_wanted{false}, stopping{false};
  // checker
  std::map<uintptr_t, Segment> memory;
  Clock host;
  uint64_t host_version = 1;
  std::vector<Violation> violations;
  std::map<std::string, size_t> known_violations;
  std::vector<Synchronization> synchronizations;
  std::atomic<int> forbidden_everywhere{0};
  // blocks
  std::map<uintptr_t, std::unique_ptr<Block>> blocks;
  std::vector<std::map<int, std::vector<Block*>>> free_blocks;  // by device and stream
  std::vector<std::vector<Block*>> unowned;                     // by device, after empty_cache
  std::vector<std::vector<Block*>> limbo;                       // by device: freed, recorded streams still to get there
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
  std::map<uintptr_t, std::unique_ptr<HostBlock>> host_blocks;
  std::atomic<uintptr_t> host_low{UINTPTR_MAX}, host_high{0};

  State() {
    pools.resize(devices);
    next_of_pool.resize(devices, 0);
    free_blocks.resize(devices);
    unowned.resize(devices);
    limbo.resize(devices);
    stats.resize(devices);
    for (int d = 0; d < devices; ++d) add_stream(d, 0, "virtual:" + std::to_string(d) + " default stream");
  }

  StreamState& add_stream(DeviceIndex device, int64_t id, std::string name) {
    auto stream = std::make_unique<StreamState>();
    stream->index = static_cast<int>(streams.size());
    stream->device = device;
    stream->id = id;
    stream->name = std::move(name);
    streams.push_back(std::move(stream));
    return *streams.back();
  }
};

State& state() {
  static State* s = new State();  // never destroyed: threads and tensors may outlive main
  return *s;
}

using Lock = std::unique_lock<std::mutex>;

thread_local DeviceIndex current_device = 0;
thread_local std::vector<int> current_streams;  // by device: index into State::streams
thread_local int forbidden_here = 0;

int current_stream_of(DeviceIndex device) {
  if (current_streams.empty())
    for (int d = 0; d < state().devices; ++d) current_streams.push_back(d);
  return current_streams.at(device);
}

int index_of(const c10::Stream& stream) {  // the id of a default stream is 0, that of the others their index
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

c10::Stream as_stream(int index) {
  Lock lock(state().mu);
  auto& s = *state().streams.at(index);
  return c10::Stream(c10::Stream::UNSAFE, Device(kVirtual, s.device), s.id);
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::shared_ptr<Operation> describe(std::string name) {
  auto info = std::make_shared<Operation>();
  info->name = std::move(name);
  if (state().stacks) info->stack = capture_stack(12);
  if (!backward_nodes.empty()) info->backward = backward_nodes.back();
  return info;
}

// ---------------------------------------------------------------------------------------------------------------- Checker

using Range = std::pair<uintptr_t, uintptr_t>;

// The bytes of a tensor: one range, or one for each row where rows are apart. More than 512 rows are taken as one range.
void add_ranges(std::vector<Range>& ranges, const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return;
  size_t item = t.dtype().itemsize();
  auto start = reinterpret_cast<uintptr_t>(t.storage().data()) + t.storage_offset() * item;
  std::vector<std::pair<size_t, size_t>> dims;  // stride in bytes, size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != 0) dims.emplace_back(t.stride(d) * item, t.size(d));
  std::sort(dims.begin(), dims.end());
  size_t inner = item, k = 0;
  while (k < dims.size() && dims[k].first <= inner) {
    inner = dims[k].first * (dims[k].second - 1) + inner;
    ++k;
  }
  size_t rows = 1, span = inner;
  for (size_t i = k; i < dims.size(); ++i) {
    rows *= dims[i].second;
    span += dims[i].first * (dims[i].second - 1);
  }
  if (rows > 512) {
    ranges.emplace_back(start, start + span);
    return;
  }
  std::vector<uintptr_t> starts{start};
  for (size_t i = k; i < dims.size(); ++i) {
    size_t n = starts.size();
    for (size_t j = 1; j < dims[i].second; ++j)
      for (size_t m = 0; m < n; ++m) starts.push_back(starts[m] + j * dims[i].first);
  }
  for (auto s : starts) ranges.emplace_back(s, s + inner);
}

Block* block_at(uintptr_t address) {
  auto& blocks = state().blocks;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  auto* block = std::prev(it)->second.get();
  return address < reinterpret_cast<uintptr_t>(block->data) + block->size ? block : nullptr;
}

HostBlock* host_block_at(uintptr_t address) {
  auto& s = state();
  if (address < s.host_low || address >= s.host_high) return nullptr;
  auto it = s.host_blocks.upper_bound(address);
  if (it == s.host_blocks.begin()) return nullptr;
  auto* block = std::prev(it)->second.get();
  return address < reinterpret_cast<uintptr_t>(block->data) + block->size ? block : nullptr;
}

uint64_t generation_at(uintptr_t address) {
  auto* block = block_at(address);
  return block ? block->generation : 0;
}

void violated(const char* first_kind, const Access& first, const char* second_kind, const Operation& second, uint64_t generation, size_t bytes) {
  auto& s = state();
  std::string key = std::string(first_kind) + first.info->name + first.info->stream + stack_text(first.info->stack) + first.info->backward + "|" +
      second_kind + second.name + second.stream + stack_text(second.stack) + second.backward;
  auto [it, fresh] = s.known_violations.emplace(key, s.violations.size());
  if (!fresh) {
    s.violations[it->second].times++;
    return;
  }
  Violation v;
  v.first_kind = first_kind;
  v.second_kind = second_kind;
  v.first = *first.info;
  v.second = second;
  v.reused = first.generation != generation;
  v.bytes = bytes;
  s.violations.push_back(std::move(v));
}

// Splits segments so that `range` begins and ends at borders, with no holes; returns the first one. Needs mu.
std::map<uintptr_t, Segment>::iterator carve(const Range& range) {
  auto& memory = state().memory;
  auto it = memory.upper_bound(range.first);
  if (it != memory.begin()) {
    auto before = std::prev(it);
    if (before->first < range.first && before->second.end > range.first) {
      Segment right = before->second;
      before->second.end = range.first;
      memory.emplace_hint(it, range.first, std::move(right));
    }
  }
  it = memory.lower_bound(range.first);
  uintptr_t at = range.first;
  while (at < range.second) {
    if (it == memory.end() || it->first > at) {
      Segment hole;
      hole.end = it == memory.end() ? range.second : std::min(range.second, it->first);
      it = memory.emplace_hint(it, at, std::move(hole));
    } else if (it->second.end > range.second) {
      Segment right = it->second;
      it->second.end = range.second;
      memory.emplace_hint(std::next(it), range.second, std::move(right));
    }
    at = it->second.end;
    ++it;
  }
  return memory.find(range.first);
}

// Is `access` before an operation of `stream` whose clock is `clock`? Stream -1 is the host.
bool ordered(const Access& access, int stream, const Clock& clock) {
  return !access || access.stream == stream || at_clock(clock, access.stream) >= access.seq;
}

void check_range(const Range& range, bool write, int stream, const Clock& clock, const OperationPtr& info, uint64_t seq) {
  auto& memory = state().memory;
  uint64_t generation = generation_at(range.first);
  auto it = carve(range);
  auto begin = it;
  size_t bytes = range.second - range.first;
  const char* kind = write ? "writes" : "reads";
  for (; it != memory.end() && it->first < range.second; ++it) {
    auto& segment = it->second;
    if (!ordered(segment.allocation, stream, clock)) {
      violated("allocates", segment.allocation, kind, *info, generation, bytes);
      segment.allocation = Access();
    }
    if (!ordered(segment.write, stream, clock)) violated("writes", segment.write, kind, *info, generation, bytes);
    if (write)
      for (auto& read : segment.reads)
        if (!ordered(read, stream, clock)) violated("reads", read, kind, *info, generation, bytes);
    if (!write && stream >= 0) {
      Access mine{stream, seq, info, generation};
      auto same = std::find_if(segment.reads.begin(), segment.reads.end(), [&](const Access& a) { return a.stream == stream; });
      if (same == segment.reads.end()) segment.reads.push_back(std::move(mine));
      else *same = std::move(mine);
    }
  }
  if (write && stream >= 0) {  // one segment for all of it
    Segment fresh;
    fresh.end = range.second;
    fresh.write = Access{stream, seq, info, generation};
    memory.erase(begin, it);
    memory.emplace(range.first, std::move(fresh));
  }
}

void host_access(const std::vector<Range>& ranges, bool write, const std::string& name) {
  auto& s = state();
  if (!s.check) return;
  std::shared_ptr<Operation> info;
  {
    Lock lock(s.mu);
    bool touched = false;
    for (auto& range : ranges) {
      auto it = s.memory.lower_bound(range.first);
      if (it != s.memory.begin() && std::prev(it)->second.end > range.first) touched = true;
      if (it != s.memory.end() && it->first < range.second) touched = true;
    }
    if (!touched) return;
  }
  info = describe(name);
  info->stream = "the host";
  Lock lock(s.mu);
  for (auto& range : ranges) check_range(range, write, -1, s.host, info, 0);
}

// ---------------------------------------------------------------------------------------------------------------- Scheduler

using Callback = int (*)(int64_t handle, int question);  // question 0: run, 1: ready?; gives 1 for yes and done
std::atomic<Callback> callback{nullptr};

void new_strategy() {
  auto& s = state();
  auto throw_ = s.dice() % 100;
  s.strategy = throw_ < 35 ? LAZY : throw_ < 60 ? RANDOM : throw_ < 80 ? AHEAD : STARVE;
  s.favourite = static_cast<int>(s.dice() % s.streams.size());
}

bool event_done(const EventState& event) {
  return state().streams[event.stream]->done >= event.seq;
}

// The stream whose head has to run next so that `stream` gets on, or -1. Needs mu.
int needed_head(int stream) {
  auto& s = state();
  for (size_t steps = 0; steps <= s.streams.size(); ++steps) {
    auto& queue = s.streams[stream]->queue;
    if (queue.empty()) return -1;
    auto& head = *queue.front();
    if (head.kind != Item::WAIT || event_done(*head.event)) return stream;
    stream = head.event->stream;
  }
  return -1;
}

bool is_ready(const std::shared_ptr<Item>& item) {  // asks Python: neither mu nor Python's lock may be held
  if (item->ready < 0) return true;
  auto f = callback.load();
  if (!f || !python_alive) return true;
  executing = true;
  int answer = f(item->ready, 1);
  executing = false;
  return answer != 0;
}

// Runs the head of a stream. Needs running_mu, not mu.
void run_head(int stream) {
  auto& s = state();
  std::shared_ptr<Item> item;
  StreamState* owner;
  {
    Lock lock(s.mu);
    owner = s.streams[stream].get();
    item = owner->queue.front();
  }
  if (item->run) {
    executing = true;
    try {
      item->run();
    } catch (const std::exception& e) {
      Lock lock(s.mu);
      s.errors.push_back(item->info->name + " on " + item->info->stream + " failed when it ran: " + e.what() + "\nenqueued at\n" + stack_text(item->info->stack));
    }
    executing = false;
  }
  std::function<void()> closure;
  {
    Lock lock(s.mu);
    for (auto& [data, size] : item->poison) memset(data, 0xff, size);
    for (auto* block : item->host_blocks) block->pending--;
    if (item->kind == Item::RECORD) item->event->time = now_ms();
    owner->queue.pop_front();
    owner->done = item->seq;
    s.executed++;
    s.progress++;
    std::swap(closure, item->run);
  }
}  // the closure is destroyed here, without mu

// One step towards `target` (-1: towards nothing in particular). Gives false when nothing could run. Needs running_mu.
bool step(int target) {
  auto& s = state();
  std::vector<int> order;
  {
    Lock lock(s.mu);
    int needed = target < 0 ? -1 : needed_head(target);
    std::vector<int> others;
    for (auto& stream : s.streams) {
      if (stream->queue.empty() || stream->index == needed) continue;
      auto& head = *stream->queue.front();
      if (head.kind == Item::WAIT && !event_done(*head.event)) continue;
      others.push_back(stream->index);
    }
    std::shuffle(others.begin(), others.end(), s.dice);
    auto favourite = std::find(others.begin(), others.end(), s.favourite);
    bool needed_first = true;
    switch (s.strategy) {
      case LAZY:
        break;
      case RANDOM:
        needed_first = s.dice() % (others.size() + 1) == 0;
        break;
      case AHEAD:
        if (favourite != others.end()) {
          std::iter_swap(others.begin(), favourite);
          needed_first = false;
        }
        break;
      case STARVE:
        if (favourite != others.end()) std::iter_swap(std::prev(others.end()), favourite);
        needed_first = others.empty() || others.front() == s.favourite;
        break;
    }
    if (needed >= 0 && needed_first) order.push_back(needed);
    order.insert(order.end(), others.begin(), others.end());
    if (needed >= 0 && !needed_first) order.push_back(needed);
  }
  for (int stream : order) {
    std::shared_ptr<Item> head;
    {
      Lock lock(s.mu);
      head = s.streams[stream]->queue.front();
    }
    if (is_ready(head)) {
      run_head(stream);
      return true;
    }
  }
  return false;
}

std::string pending_text() {
  auto& s = state();
  Lock lock(s.mu);
  std::string text;
  for (auto& stream : s.streams) {
    if (stream->queue.empty()) continue;
    auto& head = *stream->queue.front();
    text += stream->name + ": " + std::to_string(stream->queue.size()) + " to run, first " +
        (head.kind == Item::WAIT ? "a wait for " + s.streams[head.event->stream]->name : head.kind == Item::RECORD ? "an event" : head.info->name) +
        (head.ready >= 0 ? " (when it is ready)" : "") + "\n";
  }
  return text;
}

// Runs until `stream` has run its operation `seq`. Called with neither lock held; Python's lock is given back.
void run_until(int stream, uint64_t seq) {
  auto& s = state();
  TORCH_CHECK(!executing, "an operation that runs on a virtual stream may not wait for other virtual work");
  {
    Lock lock(s.mu);
    if (s.streams[stream]->done >= seq) return;
    new_strategy();
  }
  WithoutGil without;
  auto since = std::chrono::steady_clock::now();
  uint64_t seen = s.progress;
  while (true) {
    bool ran;
    {
      Lock running(s.running_mu);
      {
        Lock lock(s.mu);
        if (s.streams[stream]->done >= seq) return;
      }
      ran = step(stream);
    }
    if (ran) continue;
    if (seen != s.progress) {
      seen = s.progress;
      since = std::chrono::steady_clock::now();
    }
    double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    TORCH_CHECK(waited < s.timeout, "virtual device: nothing ran for ", s.timeout, " seconds. Waiting:\n", pending_text());
    std::this_thread::sleep_for(std::chrono::microseconds(waited < 0.01 ? 50 : 500));
  }
}

void raise_error() {
  auto& s = state();
  std::string error;
  {
    Lock lock(s.mu);
    if (s.errors.empty()) return;
    error = s.errors.front();
    s.errors.clear();
  }
  TORCH_CHECK(false, error);
}

// Work with `ready` goes on while the host does something else, as on a real device.
void background_loop() {
  auto& s = state();
  uint64_t seen = 0;
  int idle = 0;
  while (!s.stopping) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    if (s.progress != seen) {
      seen = s.progress;
      idle = 0;
      continue;
    }
    if (++idle < 4) continue;
    std::vector<int> targets;
    {
      Lock lock(s.mu);
      for (auto& stream : s.streams)
        for (auto& item : stream->queue)
          if (item->ready >= 0) {
            targets.push_back(stream->index);
            break;
          }
    }
    for (int target : targets) {
      while (!s.stopping) {
        Lock running(s.running_mu, std::try_to_lock);
        if (!running.owns_lock()) break;
        int head;
        std::shared_ptr<Item> item;
        {
          Lock lock(s.mu);
          head = needed_head(target);
          if (head >= 0) item = s.streams[head]->queue.front();
        }
        if (!item || !is_ready(item)) break;
        run_head(head);
        if (item->ready >= 0 && head == target) break;
      }
    }
    seen = s.progress;  // stays idle: goes on at once
  }
}

// Counts a host synchronization, or refuses it where it is forbidden.
void count_synchronization(const std::string& name) {
  auto& s = state();
  Synchronization record;
  record.name = name;
  record.thread = gettid();
  bool refused = s.forbidden_everywhere > 0 || forbidden_here > 0 ||
      (s.forbidden_everywhere < 0 && torch::autograd::get_current_graph_task_id() != -1);
  PyStack stack = s.stacks || refused ? capture_stack(16) : PyStack();
  record.stack = stack_text(stack);
  if (!backward_nodes.empty()) record.backward = backward_nodes.back();
  TORCH_CHECK(
      !refused, "host synchronization where none is allowed: ", name, record.backward.empty() ? "" : " in " + record.backward, "\n", record.stack);
  Lock lock(s.mu);
  if (s.synchronizations.size() < 1000000) s.synchronizations.push_back(std::move(record));
}

void host_knows(const Clock& clock) {
  auto& s = state();
  Lock lock(s.mu);
  join(s.host, clock);
  s.host_version++;
}

void synchronize_stream(int stream, const std::string& name, bool counted = true) {
  if (counted) count_synchronization(name);
  auto& s = state();
  uint64_t seq;
  Clock clock;
  {
    Lock lock(s.mu);
    seq = s.streams[stream]->enqueued;
    clock = s.streams[stream]->clock;
  }
  run_until(stream, seq);
  host_knows(clock);
  raise_error();
}

void synchronize_all(DeviceIndex device, const std::string& name, bool counted = true) {
  if (counted) count_synchronization(name);
  auto& s = state();
  std::vector<int> targets;
  {
    Lock lock(s.mu);
    for (auto& stream : s.streams)
      if (device < 0 || stream->device == device) targets.push_back(stream->index);
    std::shuffle(targets.begin(), targets.end(), s.dice);
  }
  for (int target : targets) {
    uint64_t seq;
    Clock clock;
    {
      Lock lock(s.mu);
      seq = s.streams[target]->enqueued;
      clock = s.streams[target]->clock;
    }
    run_until(target, seq);
    host_knows(clock);
  }
  raise_error();
}

struct Work {
  std::vector<Range> reads, writes;
  std::shared_ptr<Operation> info;
  std::function<void()> run;
  int64_t ready = -1;
};

// Needs mu.
Item& push(StreamState& stream, std::shared_ptr<Item> item) {
  auto& s = state();
  if (stream.host_version != s.host_version) {
    join(stream.clock, s.host);
    stream.host_version = s.host_version;
  }
  item->seq = ++stream.enqueued;
  if (stream.clock.size() <= static_cast<size_t>(stream.index)) stream.clock.resize(stream.index + 1);
  stream.clock[stream.index] = item->seq;
  stream.queue.push_back(item);
  if (item->kind == Item::OPERATION) stream.last_operation = item->seq;
  s.progress++;
  return *item;
}

void enqueue(int stream_index, Work work) {
  auto& s = state();
  TORCH_CHECK(!executing, "an operation that runs on a virtual stream may not enqueue other virtual work: ", work.info->name);
  auto item = std::make_shared<Item>();
  uint64_t seq;
  {
    Lock lock(s.mu);
    auto& stream = *s.streams[stream_index];
    work.info->stream = stream.name;
    item->info = work.info;
    item->run = std::move(work.run);
    item->ready = work.ready;
    for (auto* ranges : {&work.reads, &work.writes})
      for (auto& range : *ranges)
        if (auto* block = host_block_at(range.first)) {
          block->pending++;
          item->host_blocks.push_back(block);
        }
    push(stream, item);
    seq = item->seq;
    if (s.check) {
      for (auto& range : work.reads) check_range(range, false, stream.index, stream.clock, item->info, seq);
      for (auto& range : work.writes) check_range(range, true, stream.index, stream.clock, item->info, seq);
    }
  }
  if (work.ready >= 0 && !s.background_wanted.exchange(true)) s.background = std::thread(background_loop);
  if (s.immediate) run_until(stream_index, seq);
}

void wait_event(const std::shared_ptr<EventState>& event, int stream_index) {
  auto& s = state();
  Lock lock(s.mu);
  auto& stream = *s.streams[stream_index];
  if (event->stream == stream_index) return;
  auto item = std::make_shared<Item>();
  item->kind = Item::WAIT;
  item->event = event;
  push(stream, item);
  join(stream.clock, event->clock);
}

std::shared_ptr<EventState> record_event(int stream_index) {
  auto& s = state();
  Lock lock(s.mu);
  auto& stream = *s.streams[stream_index];
  auto event = std::make_shared<EventState>();
  auto item = std::make_shared<Item>();
  item->kind = Item::RECORD;
  item->event = event;
  push(stream, item);
  event->stream = stream_index;
  event->seq = item->seq;
  event->clock = stream.clock;
  return event;
}

// By the seed, one operation of what `stream` needs runs, or none.
void nudge(int stream) {
  auto& s = state();
  if (executing) return;
  WithoutGil without;
  Lock running(s.running_mu, std::try_to_lock);
  if (!running.owns_lock()) return;
  {
    Lock lock(s.mu);
    if (s.dice() % 3 == 0 || needed_head(stream) < 0) return;
  }
  step(stream);
}

// ---------------------------------------------------------------------------------------------------------------- Memory

// Have all uses of these bytes run? `but` names a stream whose uses don't matter. Needs mu.
bool quiet(const Range& range, int but) {
  auto& s = state();
  auto pending = [&](const Access& a) { return a && a.stream != but && s.streams[a.stream]->done < a.seq; };
  auto it = s.memory.lower_bound(range.first);
  if (it != s.memory.begin() && std::prev(it)->second.end > range.first) --it;
  for (; it != s.memory.end() && it->first < range.second; ++it) {
    if (pending(it->second.write)) return false;
    for (auto& read : it->second.reads)
      if (pending(read)) return false;
  }
  return true;
}

void back_to_cache(Block* block) {
  state().free_blocks[block->device][block->stream].push_back(block);
}

// Blocks whose recorded streams got there. Needs mu.
void process_limbo(DeviceIndex device) {
  auto& s = state();
  auto& limbo = s.limbo[device];
  for (size_t i = 0; i < limbo.size();) {
    Block* block = limbo[i];
    bool over = std::all_of(block->in_use.begin(), block->in_use.end(), [&](auto& use) { return s.streams[use.first]->done >= use.second; });
    if (!over) {
      ++i;
      continue;
    }
    auto start = reinterpret_cast<uintptr_t>(block->data);
    auto past = [&](const Access& a) {
      return std::any_of(block->in_use.begin(), block->in_use.end(), [&](auto& use) { return a.stream == use.first && a.seq <= use.second; });
    };
    for (auto it = s.memory.lower_bound(start); it != s.memory.end() && it->first < start + block->size; ++it) {
      if (past(it->second.write)) it->second.write = Access();
      auto& reads = it->second.reads;
      reads.erase(std::remove_if(reads.begin(), reads.end(), past), reads.end());
    }
    block->in_use.clear();
    back_to_cache(block);
    limbo.erase(limbo.begin() + static_cast<long>(i));
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& s = state();
  Lock lock(s.mu);
  auto& stats = s.stats[block->device];
  stats.allocated_bytes[0].decrease(block->allocated);
  stats.active_bytes[0].decrease(block->allocated);
  stats.requested_bytes[0].decrease(block->allocated);
  stats.allocation[0].decrease(1);
  stats.active[0].decrease(1);
  block->allocated = 0;
  block->generation++;
  for (int stream : block->recorded)
    if (stream != block->stream) block->in_use.emplace_back(stream, s.streams[stream]->enqueued);
  block->recorded.clear();
  if (block->in_use.empty()) back_to_cache(block);
  else s.limbo[block->device].push_back(block);
}

Block* take_block(DeviceIndex device, int stream, size_t size) {  // needs mu
  auto& s = state();
  process_limbo(device);
  auto fits = [&](Block* b) { return b->size >= size && b->size <= std::max<size_t>(2 * size, 4096); };
  for (auto* list : {&s.free_blocks[device][stream], &s.unowned[device]})
    for (auto it = list->rbegin(); it != list->rend(); ++it)
      if (fits(*it)) {
        Block* block = *it;
        list->erase(std::next(it).base());
        return block;
      }
  auto block = std::make_unique<Block>();
  block->size = size;
  block->data = static_cast<char*>(std::aligned_alloc(512, size));
  TORCH_CHECK(block->data, "virtual device: out of host memory, asked for ", size, " bytes");
  auto* raw = block.get();
  s.blocks.emplace(reinterpret_cast<uintptr_t>(block->data), std::move(block));
  s.stats[device].reserved_bytes[0].increase(size);
  s.stats[device].num_device_alloc++;
  return raw;
}

c10::DataPtr allocate(size_t bytes, DeviceIndex device) {
  if (bytes == 0) return c10::DataPtr(nullptr, Device(kVirtual, device));
  auto& s = state();
  int stream_index = current_stream_of(device);
  size_t size = (bytes + 511) / 512 * 512;
  std::shared_ptr<Operation> info = s.check ? describe("allocation") : nullptr;
  Lock lock(s.mu);
  Block* block = take_block(device, stream_index, size);
  auto& stream = *s.streams[stream_index];
  block->device = device;
  block->stream = stream_index;
  block->allocated = size;
  block->generation++;
  auto& stats = s.stats[device];
  stats.allocated_bytes[0].increase(size);
  stats.active_bytes[0].increase(size);
  stats.requested_bytes[0].increase(size);
  stats.allocation[0].increase(1);
  stats.active[0].increase(1);
  auto start = reinterpret_cast<uintptr_t>(block->data);
  Range range(start, start + block->size);
  if (s.check) {
    // Whoever uses it on another stream has to wait for what this stream did so far: the previous owner may still be at it.
    info->stream = stream.name;
    Access allocation{stream_index, stream.last_operation, info, block->generation};
    for (auto it = carve(range); it != s.memory.end() && it->first < range.second; ++it) it->second.allocation = allocation;
  }
  if (s.poison && s.check && quiet(range, stream_index)) {
    // At once, or after the last operation of this stream: nobody may use it before that.
    auto last = std::find_if(stream.queue.rbegin(), stream.queue.rend(), [&](const auto& item) { return item->seq == stream.last_operation; });
    if (last == stream.queue.rend() || quiet(range, -1)) memset(block->data, 0xff, block->size);
    else (*last)->poison.emplace_back(block->data, block->size);
  }
  return c10::DataPtr(block->data, block, &free_block, Device(kVirtual, device));
}

struct VirtualAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override { return ::allocate(n, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    synchronize_all(current_device, "empty_cache");
    auto& s = state();
    Lock lock(s.mu);
    process_limbo(current_device);
    for (auto& [stream, list] : s.free_blocks[current_device]) {
      for (auto* block : list) {
        auto start = reinterpret_cast<uintptr_t>(block->data);
        s.memory.erase(s.memory.lower_bound(start), s.memory.lower_bound(start + block->size));
        s.unowned[current_device].push_back(block);
      }
      list.clear();
    }
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (ptr.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(ptr.get_context());
    Lock lock(state().mu);
    block->recorded.insert(index_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(state().mu);
    return state().stats.at(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Lock lock(state().mu);
    auto& stats = state().stats.at(device);
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.allocation, &stats.active})
      for (auto& stat : *array) stat.reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(state().mu);
    auto& stats = state().stats.at(device);
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.allocation, &stats.active})
      for (auto& stat : *array) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock(state().mu);
    size_t total = size_t(80) << 30;
    return {total - static_cast<size_t>(state().stats.at(device).reserved_bytes[0].current), total};
  }
};

VirtualAllocator& allocator() {
  static auto* a = new VirtualAllocator();
  return *a;
}

void free_host_block(void* context) {
  Lock lock(state().mu);
  static_cast<HostBlock*>(context)->free = true;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return c10::DataPtr(nullptr, Device(c10::DeviceType::CPU));
    auto& s = state();
    Lock lock(s.mu);
    size_t size = (n + 511) / 512 * 512;
    for (auto& [start, block] : s.host_blocks)
      if (block->free && block->pending == 0 && block->size >= size && block->size <= 2 * size) {
        block->free = false;  // every copy that used it has run: nothing of it concerns the next owner
        carve({start, start + block->size});
        s.memory.erase(s.memory.lower_bound(start), s.memory.lower_bound(start + block->size));
        if (s.poison) memset(block->data, 0xff, block->size);
        return c10::DataPtr(block->data, block.get(), &free_host_block, Device(c10::DeviceType::CPU));
      }
    auto block = std::make_unique<HostBlock>();
    block->size = size;
    block->data = static_cast<char*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096));
    TORCH_CHECK(block->data, "virtual device: out of host memory, asked for ", size, " pinned bytes");
    if (s.poison) memset(block->data, 0xff, size);
    auto* raw = block.get();
    auto start = reinterpret_cast<uintptr_t>(block->data);
    s.host_low = std::min<uintptr_t>(s.host_low, start);
    s.host_high = std::max<uintptr_t>(s.host_high, start + size);
    s.host_blocks.emplace(start, std::move(block));
    return c10::DataPtr(raw->data, raw, &free_host_block, Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

bool is_pinned(const void* data) {
  Lock lock(state().mu);
  return data && host_block_at(reinterpret_cast<uintptr_t>(data)) != nullptr;
}

// ---------------------------------------------------------------------------------------------------------------- Guard, hooks, generator

struct VirtualEvent {
  std::shared_ptr<EventState> state;
};

struct VirtualGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kVirtual; }
  Device exchangeDevice(Device d) const override {
    Device old(kVirtual, current_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kVirtual, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < state().devices, "virtual device: no such device: ", int(d.index()));
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(Device d) const override { return as_stream(current_stream_of(d.has_index() ? d.index() : current_device)); }
  c10::Stream getDefaultStream(Device d) const override { return as_stream(d.has_index() ? d.index() : current_device); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    auto& s = state();
    DeviceIndex device = d.has_index() ? d.index() : current_device;
    Lock lock(s.mu);
    auto& pool = s.pools.at(device);
    if (pool.size() < 32) {  // as CUDA's: 32, then the first again
      int number = static_cast<int>(pool.size());
      auto& stream = s.add_stream(device, static_cast<int64_t>(s.streams.size()), "virtual:" + std::to_string(device) + " stream " + std::to_string(number));
      pool.push_back(stream.index);
      return c10::Stream(c10::Stream::UNSAFE, Device(kVirtual, device), stream.id);
    }
    size_t number = s.next_of_pool[device]++ % pool.size();
    int index = pool[number];
    s.streams[index]->name = "virtual:" + std::to_string(device) + " stream " + std::to_string(number);
    return c10::Stream(c10::Stream::UNSAFE, Device(kVirtual, device), s.streams[index]->id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int old = current_stream_of(stream.device_index());
    current_streams[stream.device_index()] = index_of(stream);
    return as_stream(old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(static_cast<intptr_t>(index_of(stream))); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<VirtualEvent*>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new VirtualEvent();
    static_cast<VirtualEvent*>(*event)->state = record_event(index_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<VirtualEvent*>(event);
    if (e && e->state) wait_event(e->state, index_of(stream));
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<VirtualEvent*>(event);
    if (!e || !e->state) return true;
    auto& s = state();
    auto done = [&] {
      Lock lock(s.mu);
      return event_done(*e->state);
    };
    if (!done()) nudge(e->state->stream);
    if (!done()) return false;
    host_knows(e->state->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<VirtualEvent*>(event);
    if (!e || !e->state) return;
    count_synchronization("event.synchronize");
    auto recorded = e->state;
    run_until(recorded->stream, recorded->seq);
    host_knows(recorded->clock);
    raise_error();
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& s = state();
    int index = index_of(stream);
    Clock clock;
    auto done = [&] {
      Lock lock(s.mu);
      clock = s.streams[index]->clock;
      return s.streams[index]->done >= s.streams[index]->enqueued;
    };
    if (!done()) nudge(index);
    if (!done()) return false;
    host_knows(clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(index_of(stream), "stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_all(device, "device.synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override { allocator().recordStream(ptr, stream); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto* a = static_cast<VirtualEvent*>(first);
    auto* b = static_cast<VirtualEvent*>(second);
    TORCH_CHECK(a && b && a->state && b->state, "both events must be recorded before their time is asked for");
    Lock lock(state().mu);
    TORCH_CHECK(event_done(*a->state) && event_done(*b->state), "both events must be completed before their time is asked for");
    return b->state->time - a->state->time;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(state().devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }
};

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

struct VirtualGenerator final : c10::GeneratorImpl {
  std::atomic<uint64_t> seed_{c10::default_rng_seed_val}, offset_{0};
  explicit VirtualGenerator(DeviceIndex device) : GeneratorImpl(Device(kVirtual, device), c10::DispatchKeySet(DispatchKey::PrivateUse1)) {}
  uint64_t next() { return mix(seed_ ^ mix(offset_++ + 1)); }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& fresh) override {
    TORCH_CHECK(fresh.numel() == 16 && fresh.dtype() == caffe2::TypeMeta::Make<uint8_t>() && fresh.is_cpu(), "a virtual generator's state is 16 bytes on the CPU");
    uint64_t words[2];
    memcpy(words, fresh.storage().data(), 16);
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor t = at::detail::empty_cpu({16}, at::kByte);
    uint64_t words[2] = {seed_, offset_};
    memcpy(t.mutable_data_ptr(), words, 16);
    return t.getIntrusivePtr();
  }
  VirtualGenerator* clone_impl() const override {
    auto* copy = new VirtualGenerator(device_.index());
    copy->seed_ = seed_.load();
    copy->offset_ = offset_.load();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int d = 0; d < state().devices; ++d) all->push_back(at::make_generator<VirtualGenerator>(static_cast<DeviceIndex>(d)));
    return all;
  }();
  return generators->at(device < 0 ? current_device : device);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes);

struct VirtualHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(state().devices); }
  void setCurrentDevice(DeviceIndex d) const override { VirtualGuard().setDevice(Device(kVirtual, d)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current_device;
    setCurrentDevice(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* a = new PinnedAllocator();
    return a;
  }
  Device getDeviceFromPtr(void* data) const override {
    Lock lock(state().mu);
    auto* block = block_at(reinterpret_cast<uintptr_t>(data));
    TORCH_CHECK(block, "this pointer is not in a virtual device's memory");
    return Device(kVirtual, block->device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<VirtualGenerator>(d < 0 ? current_device : d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage.unsafeGetStorageImpl(), bytes); }
};

// ---------------------------------------------------------------------------------------------------------------- Operators

// Below autograd, autocast and every Python mode: kernels only.
struct KernelsOnly {
  c10::impl::ForceDispatchKeyGuard keys;
  at::RecordFunctionGuard no_records;
  KernelsOnly() : keys(included(), excluded()), no_records(false) {}
  static c10::DispatchKeySet included() { return c10::default_included_set - c10::DispatchKeySet(DispatchKey::ADInplaceOrView); }
  static c10::DispatchKeySet excluded() {
    using K = DispatchKey;
    return c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet({K::Python, K::PythonTLSSnapshot, K::Functionalize, K::PythonDispatcher, K::FuncTorchDynamicLayerFrontMode,
                             K::FuncTorchDynamicLayerBackMode, K::AutocastPrivateUse1, K::AutocastCPU, K::PreDispatch});
  }
};

bool is_virtual(const Tensor& t) {
  return t.defined() && t.device().type() == kVirtual;
}

c10::ScalarType dtype_of(const Tensor& t) {
  return t.scalar_type();
}

void copy_marks(const Tensor& from, const Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// A CPU tensor over the same memory. It keeps nothing alive: memory is never given back to the system.
Tensor cpu_alias(const Tensor& t, const char* name) {
  Tensor alias;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) {
    alias = at::detail::empty_strided_cpu(t.sizes(), t.strides(), dtype_of(t));
  } else {
    size_t item = t.dtype().itemsize();
    size_t needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), item, t.storage_offset());
    TORCH_CHECK(
        t.storage().nbytes() >= needed && t.storage().data(), name, " uses a tensor of ", t.sizes(), " whose storage holds ", t.storage().nbytes(),
        " bytes instead of ", needed, " or more: was it resized to 0?");
    auto* data = static_cast<char*>(const_cast<void*>(t.storage().data())) + t.storage_offset() * item;
    alias = at::for_blob(data, t.sizes()).strides(t.strides()).options(options).target_device(Device(at::kCPU)).make_tensor();
  }
  copy_marks(t, alias);
  return alias;
}

Tensor meta_of(const Tensor& t) {
  Tensor meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), dtype_of(t));
  copy_marks(t, meta);
  return meta;
}

Tensor cpu_copy(const Tensor& t) {  // of a CPU tensor, now
  Tensor copy = at::detail::empty_strided_cpu(t.sizes(), t.strides(), dtype_of(t));
  copy.copy_(t);
  copy_marks(t, copy);
  return copy;
}

Tensor new_virtual(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, DeviceIndex device) {
  auto previous = current_device;
  current_device = device;
  Tensor t = at::detail::empty_strided_generic(sizes, strides, &allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1), dtype);
  current_device = previous;
  return t;
}

// The same list of values with every tensor replaced. Gives the value itself where there is no tensor in it.
IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (Tensor t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& entry : value.toOptionalTensorVector()) list.push_back(entry && entry->defined() ? std::optional<Tensor>(f(*entry)) : entry);
    return list;
  }
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector())
      if (t.defined()) f(t);
  } else if (value.isOptionalTensorList()) {
    for (const auto& entry : value.toOptionalTensorVector())
      if (entry && entry->defined()) f(*entry);
  }
}

struct Facts {  // about an operator, found once
  std::string name, overload;
  std::vector<bool> written;      // by argument
  std::vector<int> same_as;       // by return: the argument that it is, or -1
  bool out = false;               // has out= arguments
  bool makes_tensors = false;     // a return is a new tensor
  bool waits = false;             // its result depends on data
  bool random = false;
  bool view = false;
  int generator = -1;
  int indices = -1;               // argument of indices that may be masks
  int index_values = -1;
  bool dropout = false;
  mutable std::atomic<bool> without_meta{false};
};

const Facts& facts_of(const OperatorHandle& op) {
  static std::mutex facts_mu;
  static std::unordered_map<const void*, std::unique_ptr<Facts>> known;
  std::lock_guard<std::mutex> lock(facts_mu);
  auto& entry = known[&op.schema()];
  if (entry && entry->name == op.schema().name() && entry->overload == op.schema().overload_name()) return *entry;
  if (entry) entry.release();  // of an operator that is gone; operations to run may still name it
  auto facts = std::make_unique<Facts>();
  const auto& schema = op.schema();
  facts->name = schema.name();
  facts->overload = schema.overload_name();
  facts->without_meta = facts->name.find("_norm") != std::string::npos;  // meta gives statistics in fp32, the CPU in the dtype of the input
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if ((facts->name == "aten::native_batch_norm" || facts->name == "aten::cudnn_batch_norm") && argument.name().rfind("running_", 0) == 0) write = true;
    facts->written.push_back(write);
    if (write && argument.is_out()) facts->out = true;
    if (argument.type()->str().find("Generator") != std::string::npos) facts->generator = static_cast<int>(i);
    if (argument.name() == "indices" && argument.type()->str().find("Tensor?[]") != std::string::npos) facts->indices = static_cast<int>(i);
    if (argument.name() == "values" && facts->name.find("index_put") != std::string::npos) facts->index_values = static_cast<int>(i);
  }
  for (const auto& ret : schema.returns()) {
    int same = -1;
    if (ret.alias_info()) {
      for (size_t i = 0; i < arguments.size() && same < 0; ++i)
        if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == ret.alias_info()->beforeSets()) same = static_cast<int>(i);
      if (!ret.alias_info()->isWrite()) facts->view = true;
    }
    facts->same_as.push_back(same);
    auto type = ret.type()->str();
    bool tensors = type.find("Tensor") != std::string::npos;
    if (!tensors) facts->waits = true;
    if (tensors && same < 0) facts->makes_tensors = true;
  }
  if (op.hasTag(at::Tag::data_dependent_output)) facts->waits = true;
  if (op.hasTag(at::Tag::dynamic_output_shape) && facts->indices < 0) facts->waits = true;
  facts->random = op.hasTag(at::Tag::nondeterministic_seeded) || facts->generator >= 0;
  facts->dropout = facts->name == "aten::native_dropout" && schema.overload_name().empty();
  entry = std::move(facts);
  return *entry;
}

// Runs the CPU kernel, with a seed where it is random.
void run_kernel(const OperatorHandle& op, const Facts& facts, Stack& stack, uint64_t seed) {
  KernelsOnly kernels;
  if (facts.dropout) {  // it takes no generator: its own two operations, with ours
    Tensor input = stack[0].toTensor();
    double p = stack[1].toDouble();
    bool train = stack[2].isNone() || stack[2].toBool();
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    if (input.numel() == 0 || !train || p == 0) {
      Tensor mask = at::detail::empty_cpu(input.sizes(), at::kBool);
      mask.fill_(true);
      stack = {input, mask};
      return;
    }
    Tensor mask = at::detail::empty_strided_cpu(input.sizes(), input.strides(), at::kBool);
    double keep = 1. - p;
    mask.bernoulli_(keep, generator);
    Tensor output = input.mul(mask);
    output.mul_(keep == 0 ? 0. : 1. / keep);
    stack = {output, mask};
    return;
  }
  if (!facts.random) {
    op.callBoxed(&stack);
    return;
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (facts.generator >= 0) {
    stack[facts.generator] = generator;
    op.callBoxed(&stack);
    return;
  }
  static std::mutex default_mu;
  std::lock_guard<std::mutex> lock(default_mu);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor saved(cpu.get_state());
  cpu.set_current_seed(seed);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    cpu.set_state(saved);
    throw;
  }
  cpu.set_state(saved);
}

struct Pair {  // a result of a kernel and the memory where it has to be
  size_t index;
  int64_t entry;  // of a list, or -1
  Tensor memory;
};

void put_results(const Stack& results, const std::vector<Pair>& pairs) {
  KernelsOnly kernels;
  for (auto& pair : pairs) {
    if (!pair.memory.defined()) continue;
    Tensor result = pair.entry < 0 ? results[pair.index].toTensor() : results[pair.index].toTensorVector().at(pair.entry);
    if (!result.defined() || result.numel() == 0) continue;
    TORCH_CHECK(result.sizes() == pair.memory.sizes(), "the kernel gave ", result.sizes(), " where ", pair.memory.sizes(), " was foreseen");
    pair.memory.copy_(result);
  }
}

std::vector<int64_t> dense_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

void resize_tensor(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = t.unsafeGetTensorImpl();
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  size_t needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.dtype().itemsize(), t.storage_offset());
  if (t.numel() > 0 && t.storage().nbytes() < needed) resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
}

// What the arguments of a call say about where it runs.
struct Place {
  DeviceIndex device = -1;
  bool any = false;
};

Place place_of(const Facts& facts, at::ArrayRef<IValue> arguments) {
  Place place;
  for (const auto& argument : arguments)
    each_tensor(argument, [&](const Tensor& t) {
      if (!is_virtual(t)) return;
      if (!place.any) {
        place.device = t.device().index();
        place.any = true;
      } else {
        TORCH_CHECK(
            place.device == t.device().index() || t.dim() == 0, "Expected all tensors to be on the same device, but ", facts.name, " got virtual:",
            int(place.device), " and virtual:", int(t.device().index()));
      }
    });
  if (!place.any)
    for (const auto& argument : arguments)
      if (argument.isDevice() && argument.toDevice().type() == kVirtual) place.device = argument.toDevice().index();
  if (place.device < 0) place.device = current_device;
  return place;
}

// What shapes depend on, as bytes. Gives false for a value that it doesn't know.
bool add_to_key(std::string& key, const IValue& value) {
  auto number = [&](int64_t x) { key.append(reinterpret_cast<const char*>(&x), sizeof x); };
  auto tensor = [&](const Tensor& t) {
    if (!t.defined()) {
      key += 'u';
      return;
    }
    key += 't';
    number(static_cast<int64_t>(t.scalar_type()) | t.is_conj() << 8 | t.is_neg() << 9 | t.is_cpu() << 10 | t.unsafeGetTensorImpl()->is_wrapped_number() << 11);
    number(t.dim());
    for (auto x : t.sizes()) number(x);
    for (auto x : t.strides()) number(x);
  };
  if (value.isNone() || value.isGenerator()) key += 'n';
  else if (value.isTensor()) tensor(value.toTensor());
  else if (value.isTensorList() || value.isOptionalTensorList()) {
    key += 'l';
    if (value.isTensorList()) {
      for (const Tensor& t : value.toTensorVector()) tensor(t);
    } else {
      for (const auto& t : value.toOptionalTensorVector()) tensor(t ? *t : Tensor());
    }
    key += 'e';
  } else if (value.isBool()) key += value.toBool() ? 'T' : 'F';
  else if (value.isInt()) key += 'i', number(value.toInt());
  else if (value.isDouble()) {
    double x = value.toDouble();
    key += 'd';
    key.append(reinterpret_cast<const char*>(&x), sizeof x);
  } else if (value.isIntList()) {
    key += 'I';
    for (int64_t x : value.toIntVector()) number(x);
    key += 'e';
  } else if (value.isString()) key += 's' + value.toStringRef() + '\0';
  else if (value.isDevice()) key += 'D';
  else return false;
  return true;
}

// Returns with the shapes of the results: from meta tensors, or from the kernel itself on zeros where there is no meta kernel.
Stack shapes_of(const OperatorHandle& op, const Facts& facts, const std::vector<IValue>& arguments, const Stack& cpu) {
  static std::mutex shapes_mu;
  static std::unordered_map<std::string, Stack> known;
  const size_t n = arguments.size();
  const Facts* address = &facts;
  std::string key(reinterpret_cast<const char*>(&address), sizeof address);
  bool keep = true;
  for (size_t i = 0; i < n && keep; ++i) keep = add_to_key(key, arguments[i]);
  if (keep) {
    std::lock_guard<std::mutex> lock(shapes_mu);
    auto it = known.find(key);
    if (it != known.end()) return it->second;
  }
  KernelsOnly kernels;
  Stack shapes;
  bool meta = !facts.without_meta && op.hasComputedKernelForDispatchKey(DispatchKey::Meta);
  if (meta) {
    for (size_t i = 0; i < n; ++i) {
      if (arguments[i].isDevice()) shapes.emplace_back(Device(at::kMeta));
      else if (arguments[i].isGenerator()) shapes.emplace_back();
      else shapes.push_back(map_tensors(arguments[i], [](const Tensor& t) { return is_virtual(t) || t.dim() > 0 ? meta_of(t) : t; }));
    }
    try {
      op.callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
      facts.without_meta = true;
      meta = false;
    } catch (const std::exception&) {  // the kernel on zeros says what is wrong, or it is the meta kernel that cannot do it
      meta = false;
    }
  }
  if (!meta) {
    shapes.clear();
    for (size_t i = 0; i < n; ++i)
      shapes.push_back(map_tensors(cpu[i], [](const Tensor& t) {
        Tensor zeros = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
        zeros.zero_();
        copy_marks(t, zeros);
        return zeros;
      }));
    run_kernel(op, facts, shapes, 0);
    for (auto& shape : shapes) shape = map_tensors(shape, meta_of);
  }
  if (keep) {
    std::lock_guard<std::mutex> lock(shapes_mu);
    if (known.size() < 100000) known.emplace(std::move(key), shapes);
  }
  return shapes;
}

void fallback(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Facts& facts = facts_of(op);
  auto& s = state();
  const size_t n = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - static_cast<long>(n), stack->end());
  TORCH_CHECK_NOT_IMPLEMENTED(!facts.view, "virtual device: the view operator ", facts.name, " is not implemented");
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(DispatchKey::CPU), "virtual device: ", facts.name, " has no kernel for the CPU, which would run it");
  TORCH_CHECK(!executing, "an operation that runs on a virtual stream may not use virtual tensors: ", facts.name);
  Place place = place_of(facts, arguments);
  int stream = current_stream_of(place.device);

  // Indices: a mask's count is needed on the host; indices in host memory are copied as torch does on CUDA.
  bool waits = facts.waits;
  if (facts.indices >= 0) {
    bool masks = false;
    each_tensor(arguments[facts.indices], [&](const Tensor& t) { masks = masks || t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
    bool fill = facts.index_values >= 0 && arguments[facts.index_values].toTensor().numel() == 1;  // becomes masked_fill
    if (masks && !fill) waits = true;
  }

  Work work;
  work.info = describe(facts.name);
  Stack cpu;
  cpu.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const auto& argument = arguments[i];
    if (argument.isDevice()) {
      cpu.emplace_back(Device(at::kCPU));
      continue;
    }
    if (argument.isGenerator()) {
      cpu.emplace_back();
      continue;
    }
    bool indices = static_cast<int>(i) == facts.indices;
    cpu.push_back(map_tensors(argument, [&](const Tensor& t) {
      if (is_virtual(t)) {
        Tensor alias = cpu_alias(t, facts.name.c_str());
        add_ranges(facts.written[i] ? work.writes : work.reads, t);
        return alias;
      }
      TORCH_CHECK(
          t.device().type() == at::kCPU && (t.dim() == 0 || indices), "Expected all tensors to be on the same device, but ", facts.name, " got ", t.device(), " for '",
          op.schema().arguments()[i].name(), "' and virtual:", int(place.device));
      TORCH_CHECK(!facts.written[i], facts.name, " cannot write a tensor of ", t.device(), " among virtual ones");
      KernelsOnly kernels;
      if (indices) count_synchronization(facts.name + " (indices in host memory)");
      std::vector<Range> ranges;
      add_ranges(ranges, t);
      host_access(ranges, false, facts.name + " (an argument in host memory)");
      return cpu_copy(t);
    }));
  }
  uint64_t seed = 0;
  if (facts.random) {
    at::Generator generator = default_generator(place.device);
    if (facts.generator >= 0 && !arguments[facts.generator].isNone()) generator = arguments[facts.generator].toGenerator();
    auto* ours = dynamic_cast<VirtualGenerator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(ours, "Expected a generator of the virtual device, but ", facts.name, " got one of ", generator.device());
    seed = ours->next();
  }

  auto finish = [&](Stack results) {
    torch::jit::drop(*stack, n);
    for (auto& result : results) stack->push_back(std::move(result));
  };

  if (waits) {
    auto results = std::make_shared<Stack>();
    work.run = [op, &facts, cpu, seed, results]() {
      *results = cpu;
      run_kernel(op, facts, *results, seed);
    };
    enqueue(stream, std::move(work));
    synchronize_stream(stream, facts.name);
    Stack given;
    for (size_t r = 0; r < results->size(); ++r) {
      if (facts.same_as[r] >= 0) {
        given.push_back(arguments[facts.same_as[r]]);
        continue;
      }
      given.push_back(map_tensors((*results)[r], [&](const Tensor& t) {
        Tensor fresh = new_virtual(t.sizes(), t.strides(), t.scalar_type(), place.device);
        if (t.numel() == 0) return fresh;
        Work put;
        put.info = describe(facts.name);
        Tensor memory = cpu_alias(fresh, facts.name.c_str());
        add_ranges(put.writes, fresh);
        put.run = [memory, t]() {
          KernelsOnly kernels;
          memory.copy_(t);
        };
        enqueue(stream, std::move(put));
        return fresh;
      }));
    }
    finish(std::move(given));
    return;
  }

  std::vector<Pair> pairs;
  Stack given;
  Stack shapes;
  if (facts.makes_tensors || facts.out) {
    shapes = shapes_of(op, facts, arguments, cpu);
    for (size_t r = 0; r < shapes.size(); ++r) {
      int same = facts.same_as[r];
      if (same < 0) continue;
      if (!op.schema().arguments()[same].is_out() || !shapes[r].isTensor()) continue;
      const Tensor& out = arguments[same].toTensor();
      const Tensor& shape = shapes[r].toTensor();
      if (out.sizes() == shape.sizes()) continue;
      resize_tensor(out, shape.sizes(), shape.strides());
      cpu[same] = cpu_alias(out, facts.name.c_str());
      add_ranges(work.writes, out);
    }
  }
  for (size_t r = 0; r < facts.same_as.size(); ++r) {
    if (facts.same_as[r] >= 0) {
      given.push_back(arguments[facts.same_as[r]]);
      continue;
    }
    auto fresh = [&](const Tensor& shape, int64_t entry) {
      Tensor t = new_virtual(shape.sizes(), shape.strides(), shape.scalar_type(), place.device);
      pairs.push_back({r, entry, cpu_alias(t, facts.name.c_str())});
      add_ranges(work.writes, t);
      return t;
    };
    const auto& shape = shapes.at(r);
    if (shape.isTensor()) {
      given.push_back(shape.toTensor().defined() ? IValue(fresh(shape.toTensor(), -1)) : IValue(Tensor()));
    } else if (shape.isTensorList()) {
      c10::List<Tensor> list;
      int64_t entry = 0;
      for (const Tensor& t : shape.toTensorVector()) list.push_back(t.defined() ? fresh(t, entry) : t), ++entry;
      given.push_back(list);
    } else {
      given.push_back(shape);  // None
    }
  }
  work.run = [op, &facts, cpu = std::move(cpu), pairs = std::move(pairs), seed]() {
    Stack results = cpu;
    run_kernel(op, facts, results, seed);
    put_results(results, pairs);
  };
  enqueue(stream, std::move(work));
  finish(std::move(given));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  Device device = storage->device();
  size_t old = storage->nbytes();
  if (bytes == old) return;
  if (bytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
    storage->set_nbytes(0);
    return;
  }
  auto data = allocate(bytes, device.index());
  size_t both = std::min(old, bytes);
  if (both > 0 && storage->data()) {
    Work work;
    work.info = describe("resize_storage");
    auto* to = data.get();
    auto* from = storage->data();
    auto start = reinterpret_cast<uintptr_t>(from);
    work.reads.emplace_back(start, start + both);
    start = reinterpret_cast<uintptr_t>(to);
    work.writes.emplace_back(start, start + both);
    work.run = [to, from, both]() { memcpy(to, from, both); };
    enqueue(current_stream_of(device.index()), std::move(work));
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// ---- copies

void copy_on_stream(const Tensor& dst, const Tensor& src, int stream, const char* name) {
  Work work;
  work.info = describe(name);
  Tensor to = cpu_alias(dst, name);
  Tensor from = cpu_alias(src, name);
  add_ranges(work.reads, src);
  add_ranges(work.writes, dst);
  work.run = [to, from]() {
    KernelsOnly kernels;
    to.copy_(from);
  };
  enqueue(stream, std::move(work));
}

bool plain_copy(const Tensor& dst, const Tensor& src) {  // bytes in the same order
  if (dst.scalar_type() != src.scalar_type() || dst.is_conj() != src.is_conj() || dst.is_neg() != src.is_neg()) return false;
  if (dst.sizes() != src.sizes()) return false;
  if (dst.is_contiguous() && src.is_contiguous()) return true;
  return dst.strides() == src.strides() && dst.is_non_overlapping_and_dense();
}

void copy_(const Tensor& dst, const Tensor& src, bool non_blocking) {
  if (dst.numel() == 0) return;
  if (dst.is_same(src)) return;
  if (is_virtual(dst) && is_virtual(src)) {
    auto from = src.device().index(), to = dst.device().index();
    if (from == to) return copy_on_stream(dst, src, current_stream_of(to), "aten::copy_");
    int stream = current_stream_of(from), other = current_stream_of(to);  // as CUDA: on the source's stream, which both wait for
    wait_event(record_event(other), stream);
    copy_on_stream(dst, src, stream, "aten::copy_ (between devices)");
    wait_event(record_event(stream), other);
    return;
  }
  bool down = is_virtual(src);
  TORCH_CHECK((down ? dst : src).is_cpu(), "virtual device: cannot copy from ", src.device(), " to ", dst.device());
  if (!plain_copy(dst, src)) {  // as in torch's copy for CUDA: conversions on the device if non_blocking, else on the host
    KernelsOnly kernels;
    Tensor to, from;
    bool source_converts = down == non_blocking;
    auto contiguous_like = [&](const Tensor& like, c10::ScalarType dtype) {
      auto strides = dense_strides(like.sizes());
      return like.is_cpu() ? Tensor(at::detail::empty_strided_cpu(like.sizes(), strides, dtype)) : new_virtual(like.sizes(), strides, dtype, like.device().index());
    };
    if (source_converts) {
      to = dst.is_contiguous() && !dst.is_conj() && !dst.is_neg() ? Tensor(dst) : contiguous_like(dst, dst.scalar_type());
      from = src.to(dst.scalar_type()).expand_as(dst).contiguous();
    } else {
      bool same = dst.scalar_type() == src.scalar_type();
      to = dst.is_contiguous() && same && !dst.is_conj() && !dst.is_neg() ? Tensor(dst) : contiguous_like(dst, src.scalar_type());
      from = src.expand_as(dst).contiguous();
    }
    from = from.resolve_conj().resolve_neg();
    auto touched = [](const Tensor& t, bool write) {
      std::vector<Range> ranges;
      add_ranges(ranges, t);
      host_access(ranges, write, "aten::copy_ (conversion on the host)");
    };
    if (src.is_cpu() && from.const_data_ptr() != src.const_data_ptr()) touched(src, false);
    copy_(to, from, non_blocking);
    if (!to.is_same(dst)) {
      if (dst.is_cpu()) touched(dst, true);
      dst.copy_(to, non_blocking);
    }
    return;
  }
  const Tensor& host = down ? dst : src;
  auto stream = current_stream_of((down ? src : dst).device().index());
  bool pinned = is_pinned(host.const_data_ptr());
  std::string name = down ? "aten::copy_ (device to host" : "aten::copy_ (host to device";
  if (pinned && non_blocking) return copy_on_stream(dst, src, stream, (name + ")").c_str());
  name += pinned ? ", blocking)" : ", pageable)";
  count_synchronization(name);
  if (!down && !pinned && non_blocking) {  // what is there now goes up; the stream may still be late
    KernelsOnly kernels;
    copy_on_stream(dst, cpu_copy(src), stream, name.c_str());
    return;
  }
  copy_on_stream(dst, src, stream, name.c_str());
  synchronize_stream(stream, name, false);
}

// ---- the operators that are written out, all boxed

Tensor pop_tensor(const IValue& v) {
  return v.isTensor() ? v.toTensor() : Tensor();
}

struct Arguments {
  Stack* stack;
  size_t n;
  Arguments(const OperatorHandle& op, Stack* stack) : stack(stack), n(op.schema().arguments().size()) {}
  const IValue& operator[](size_t i) const { return (*stack)[stack->size() - n + i]; }
  void give(IValue result) {
    torch::jit::drop(*stack, n);
    stack->push_back(std::move(result));
  }
  void give_nothing() { torch::jit::drop(*stack, n); }
};

DeviceIndex device_argument(const IValue& v) {
  if (v.isNone()) return current_device;
  auto d = v.toDevice();
  return d.has_index() ? d.index() : current_device;
}

c10::ScalarType dtype_argument(const IValue& v) {
  return v.isNone() ? c10::typeMetaToScalarType(c10::get_default_dtype()) : v.toScalarType();
}

void op_empty(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // size, dtype, layout, device, pin_memory, memory_format
  TORCH_CHECK(!(a[4].isBool() && a[4].toBool()), "Only dense CPU tensors can be pinned");
  auto previous = current_device;
  current_device = device_argument(a[3]);
  std::optional<c10::MemoryFormat> format;
  if (!a[5].isNone()) format = a[5].toMemoryFormat();
  auto sizes = a[0].toIntVector();
  Tensor t = at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1), dtype_argument(a[1]), format);
  current_device = previous;
  a.give(t);
}

void op_empty_strided(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // size, stride, dtype, layout, device, pin_memory
  a.give(new_virtual(a[0].toIntVector(), a[1].toIntVector(), dtype_argument(a[2]), device_argument(a[4])));
}

void op_as_strided(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  std::optional<int64_t> offset;
  if (!a[3].isNone()) offset = a[3].toInt();
  a.give(at::native::as_strided_tensorimpl(a[0].toTensor(), a[1].toIntVector(), a[2].toIntVector(), offset));
}

void op_view(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::view(a[0].toTensor(), a[1].toIntVector()));
}

void op_reshape_alias(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::_reshape_alias(a[0].toTensor(), a[1].toIntVector(), a[2].toIntVector()));
}

void op_unfold(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::unfold(a[0].toTensor(), a[1].toInt(), a[2].toInt(), a[3].toInt()));
}

void op_view_as_real(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::view_as_real(a[0].toTensor()));
}

void op_view_as_complex(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::view_as_complex(a[0].toTensor()));
}

// `tensor.data = other` between the host and the device is allowed, as it is between the host and a GPU.
void op_compatible(const OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, true);
}

void op_is_set_to(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  a.give(at::native::is_set_to(a[0].toTensor(), a[1].toTensor()));
}

void set_storage(const Tensor& self, const c10::Storage& storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), offset);
  if (self.numel() > 0 && storage.nbytes() < needed) resize_storage(storage.unsafeGetStorageImpl(), needed);
}

void op_set(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // self, and: nothing; a tensor; a storage; a storage, an offset, sizes, strides
  Tensor self = a[0].toTensor();
  if (a.n == 1) {
    c10::Storage empty(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), &allocator(), true));
    set_storage(self, empty, 0, {0}, {});
  } else if (a.n == 2 && a[1].isTensor()) {
    Tensor source = a[1].toTensor();
    set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  } else if (a.n == 2) {
    auto storage = a[1].toStorage();
    int64_t length = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
    set_storage(self, storage, 0, {length}, {});
  } else {
    set_storage(self, a[1].toStorage(), a[2].toInt(), a[3].toIntVector(), a[4].toIntVector());
  }
  a.give(self);
}

void op_resize(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  Tensor self = a[0].toTensor();
  auto sizes = a[1].toIntVector();
  if (self.sizes() != at::IntArrayRef(sizes)) resize_tensor(self, sizes, sizes.empty() ? std::vector<int64_t>() : dense_strides(sizes));
  a.give(self);
}

void op_copy_from(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // self, dst, non_blocking
  Tensor src = a[0].toTensor(), dst = a[1].toTensor();
  copy_(dst, src, a.n > 2 && a[2].toBool());
  a.give(dst);
}

void op_copy_from_and_resize(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  Tensor src = a[0].toTensor(), dst = a[1].toTensor();
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  copy_(dst, src, false);
  a.give(dst);
}

void op_record_stream(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  allocator().recordStream(a[0].toTensor().storage().data_ptr(), a[1].toStream());
  a.give_nothing();
}

// ---- autocast, as CUDA's

void autocast_to(const OperatorHandle& op, Stack* stack, std::optional<c10::ScalarType> to) {
  c10::impl::ExcludeDispatchKeyGuard without(DispatchKey::AutocastPrivateUse1);
  size_t n = op.schema().arguments().size();
  auto* begin = stack->data() + (stack->size() - n);
  if (!to) {  // the widest of the arguments
    c10::ScalarType widest = at::autocast::get_autocast_dtype(kVirtual);
    for (size_t i = 0; i < n; ++i)
      each_tensor(begin[i], [&](const Tensor& t) {
        if (is_virtual(t) && t.is_floating_point()) widest = c10::promoteTypes(widest, t.scalar_type());
      });
    to = widest == at::kDouble ? std::optional<c10::ScalarType>() : widest;
  }
  if (to)
    for (size_t i = 0; i < n; ++i)
      begin[i] = map_tensors(begin[i], [&](const Tensor& t) { return at::autocast::cached_cast(*to, t, kVirtual); });
  op.callBoxed(stack);
}

void autocast_lower(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  autocast_to(op, stack, at::autocast::get_autocast_dtype(kVirtual));
}

void autocast_fp32(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  autocast_to(op, stack, at::kFloat);
}

void autocast_promote(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  autocast_to(op, stack, std::nullopt);
}

void autocast_fp32_dtype(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  size_t n = op.schema().arguments().size();
  auto* begin = stack->data() + (stack->size() - n);
  Tensor first = pop_tensor(begin[0]);
  if (first.defined() && is_virtual(first) && (first.scalar_type() == at::kHalf || first.scalar_type() == at::kBFloat16))
    for (size_t i = 0; i < n; ++i)
      if (op.schema().arguments()[i].name() == "dtype" && begin[i].isNone()) begin[i] = at::kFloat;
  c10::impl::ExcludeDispatchKeyGuard without(DispatchKey::AutocastPrivateUse1);
  op.callBoxed(stack);
}

const char* const LOWER =
    " _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot scaled_dot_product_attention ";
const char* const FP32 =
    " acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm rms_norm group_norm "
    "nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp ";
const char* const FP32_DTYPE = " prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum ";
const char* const PROMOTE = " addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add ";

// ---- what Python calls on tensors

void op_enqueue(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // reads, writes, handle, has_ready, name, device, stream id
  Work work;
  work.info = describe(a[4].toStringRef());
  for (const Tensor& t : a[0].toTensorVector()) add_ranges(work.reads, t);
  for (const Tensor& t : a[1].toTensorVector()) add_ranges(work.writes, t);
  int64_t handle = a[2].toInt();
  if (a[3].toBool()) work.ready = handle;
  std::string name = a[4].toStringRef();
  work.run = [handle, name]() {
    auto f = callback.load();
    if (!f || !python_alive) return;
    TORCH_CHECK(f(handle, 0) != 0, "the Python function of ", name, " raised");
  };
  int stream = a[6].toInt() == 0 ? static_cast<int>(a[5].toInt()) : static_cast<int>(a[6].toInt());
  a.give_nothing();
  enqueue(stream, std::move(work));
}

void op_alias(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);
  Tensor t = a[0].toTensor();
  TORCH_CHECK(is_virtual(t) || t.is_cpu(), "cpu_alias needs a tensor of the virtual device or the CPU");
  a.give(cpu_alias(t, "cpu_alias"));
}

void op_host_access(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Arguments a(op, stack);  // tensor, write, name
  std::vector<Range> ranges;
  add_ranges(ranges, a[0].toTensor());
  host_access(ranges, a[1].toBool(), a[2].toStringRef());
  a.give_nothing();
}

// ---------------------------------------------------------------------------------------------------------------- Observer

struct OfBackward final : at::ObserverContext {
  bool pushed = false;
};

// CPU operators that touch pinned memory; and the names of autograd's nodes while they run.
std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& fn) {
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    std::string name = fn.name();
    auto colon = name.rfind(": ");
    backward_nodes.push_back(colon == std::string::npos ? name : name.substr(colon + 2));
    auto context = std::make_unique<OfBackward>();
    context->pushed = true;
    return context;
  }
  auto& s = state();
  if (executing || !s.check || s.host_high == 0) return nullptr;
  bool touches = false, virtual_too = false;
  auto look = [&](const Tensor& t) {
    if (is_virtual(t)) virtual_too = true;
    else if (t.is_cpu() && t.has_storage() && t.numel() > 0) {
      auto data = reinterpret_cast<uintptr_t>(t.storage().data());
      if (data >= s.host_low && data < s.host_high) touches = true;
    }
  };
  for (const auto& input : fn.inputs()) {
    if (input.isTensor() || input.isTensorList() || input.isOptionalTensorList()) each_tensor(input, look);
  }
  if (!touches || virtual_too) return nullptr;
  auto name = fn.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  static const std::set<std::string> without_access{
      "aten::set_", "aten::resize_", "aten::resize_as_", "aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::unfold", "aten::is_set_to", "aten::record_stream",
      "aten::empty_like", "aten::is_pinned", "aten::_nested_tensor_size"};
  const Facts& facts = facts_of(*op);
  bool leaf = facts.name == "aten::copy_" || op->hasKernelForDispatchKey(DispatchKey::CPU);
  if (!leaf || facts.view || without_access.count(facts.name)) return nullptr;
  std::vector<Range> reads, writes;
  auto inputs = fn.inputs();
  for (size_t i = 0; i < inputs.size() && i < facts.written.size(); ++i)
    each_tensor(inputs[i], [&](const Tensor& t) {
      if (!t.is_cpu() || !t.has_storage() || t.numel() == 0) return;
      std::vector<Range> own;
      add_ranges(own, t);
      Lock lock(s.mu);
      for (auto& range : own)
        if (host_block_at(range.first)) (facts.written[i] ? writes : reads).push_back(range);
    });
  if (!reads.empty()) host_access(reads, false, facts.name);
  if (!writes.empty()) host_access(writes, true, facts.name);
  return nullptr;
}

void observed(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION && context && !backward_nodes.empty()) backward_nodes.pop_back();
}

// ---------------------------------------------------------------------------------------------------------------- Control

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>();
  return *all;
}

using Boxed = void(const OperatorHandle&, c10::DispatchKeySet, Stack*);

template <Boxed* f>
void implement(const c10::OperatorName& name, DispatchKey key) {
  registrations().push_back(c10::Dispatcher::singleton().registerImpl(
      name, key, c10::KernelFunction::makeFromBoxedFunction<f>(), std::nullopt, nullptr, "the virtual device"));
}

template <Boxed* f>
void implement(const char* name, const char* overload = "") {
  implement<f>(c10::OperatorName(name, overload), DispatchKey::PrivateUse1);
}

template <Boxed* f>
void define(const char* schema) {
  auto parsed = torch::jit::parseSchema(schema);
  auto name = parsed.operator_name();
  registrations().push_back(c10::Dispatcher::singleton().registerDef(std::move(parsed), "the virtual device"));
  implement<f>(name, DispatchKey::CompositeImplicitAutograd);
}

bool among(const char* list, const std::string& name) {
  return std::string(list).find(" " + name + " ") != std::string::npos;
}

void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  implement<op_empty>("aten::empty", "memory_format");
  implement<op_empty_strided>("aten::empty_strided");
  implement<op_as_strided>("aten::as_strided");
  implement<op_view>("aten::view");
  implement<op_reshape_alias>("aten::_reshape_alias");
  implement<op_unfold>("aten::unfold");
  implement<op_view_as_real>("aten::view_as_real");
  implement<op_view_as_complex>("aten::view_as_complex");
  implement<op_is_set_to>("aten::is_set_to");
  implement<op_compatible>("aten::_has_compatible_shallow_copy_type");
  implement<op_set>("aten::set_");
  implement<op_set>("aten::set_", "source_Tensor");
  implement<op_set>("aten::set_", "source_Storage");
  implement<op_set>("aten::set_", "source_Storage_storage_offset");
  implement<op_resize>("aten::resize_");
  implement<op_copy_from>("aten::_copy_from");
  implement<op_copy_from_and_resize>("aten::_copy_from_and_resize");
  implement<op_record_stream>("aten::record_stream");
  implement<fallback>("aten::convolution");  // whole: torch's parts of it choose by device
  implement<fallback>("aten::convolution_backward");
  registrations().push_back(
      dispatcher.registerFallback(DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<fallback>(), "the virtual device"));
  registrations().push_back(
      dispatcher.registerFallback(DispatchKey::AutocastPrivateUse1, c10::KernelFunction::makeFallthrough(), "the virtual device"));

  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op) continue;
    // The CPU's own kernel where torch has both that and a composition: the bits shall be the CPU's.
    bool composed = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) || op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    if (composed && op->hasKernelForDispatchKey(DispatchKey::CPU) && !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) && !facts_of(*op).view)
      implement<fallback>(name, DispatchKey::PrivateUse1);
    const auto& facts = facts_of(*op);
    if (facts.out || (!facts.written.empty() && facts.written[0])) continue;
    std::string base = name.name.substr(6);
    if (base == "_convolution" || among(LOWER, base)) implement<autocast_lower>(name, DispatchKey::AutocastPrivateUse1);
    else if (among(FP32, base)) implement<autocast_fp32>(name, DispatchKey::AutocastPrivateUse1);
    else if (among(FP32_DTYPE, base)) implement<autocast_fp32_dtype>(name, DispatchKey::AutocastPrivateUse1);
    else if (among(PROMOTE, base)) implement<autocast_promote>(name, DispatchKey::AutocastPrivateUse1);
  }

  registrations().push_back(dispatcher.registerLibrary("virtual_device", "the virtual device"));
  define<op_enqueue>("virtual_device::enqueue(Tensor[] reads, Tensor[] writes, int handle, bool has_ready, str name, int device, int stream) -> ()");
  define<op_alias>("virtual_device::cpu_alias(Tensor tensor) -> Tensor");
  define<op_host_access>("virtual_device::host_access(Tensor tensor, bool write, str name) -> ()");
}

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\', out += c;
    else if (c == '\n') out += "\\n";
    else if (static_cast<unsigned char>(c) < 0x20) out += ' ';
    else out += c;
  }
  return out + "\"";
}

std::string as_json(const Operation& op, const std::string& kind) {
  return "{\"kind\":" + json_text(kind) + ",\"name\":" + json_text(op.name) + ",\"stream\":" + json_text(op.stream) + ",\"stack\":" + json_text(stack_text(op.stack)) +
      ",\"backward\":" + json_text(op.backward) + "}";
}

// Autograd starts a thread for each device at the process's first backward pass. Where that was before this device came, it has none.
struct AutogradThreads : torch::autograd::Engine {
  static void start() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*(&AutogradThreads::device_ready_queues_)).empty()) (engine.*(&AutogradThreads::start_device_threads))();
  }
};

thread_local std::string answer;

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Gives "" or what failed.
API const char* virtual_load() {
  answer.clear();
  try {
    state();
    c10::SetAllocator(kVirtual, &allocator());
    static auto* guard = new VirtualGuard();
    c10::impl::registerDeviceGuard(kVirtual, guard);
    at::RegisterPrivateUse1HooksInterface(new VirtualHooks());
    register_operators();
    at::addGlobalCallback(
        at::RecordFunctionCallback(observe, observed).needsInputs(true).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    WithoutGil without;
    AutogradThreads::start();
  } catch (const std::exception& e) {
    answer = e.what();
  }
  return answer.c_str();
}

API void virtual_set_callback(Callback f) {
  callback = f;
}

API void virtual_configure(int immediate, int check, int poison, int stacks, double timeout) {
  auto& s = state();
  Lock lock(s.mu);
  s.immediate = immediate;
  s.check = check;
  s.poison = poison;
  s.stacks = stacks;
  s.timeout = timeout;
}

// Runs all that was enqueued. Gives the errors of operations that failed, or "".
API const char* virtual_drain() {
  answer.clear();
  try {
    synchronize_all(-1, "drain", false);
  } catch (const std::exception& e) {
    answer = e.what();
  }
  return answer.c_str();
}

API void virtual_reset(uint64_t seed) {
  auto& s = state();
  Lock lock(s.mu);
  s.seed = seed;
  s.dice.seed(mix(seed));
  s.memory.clear();
  s.violations.clear();
  s.known_violations.clear();
  s.synchronizations.clear();
  s.executed = 0;
  for (auto& stream : s.streams) {
    if (s.host.size() <= static_cast<size_t>(stream->index)) s.host.resize(stream->index + 1);
    s.host[stream->index] = std::max(s.host[stream->index], stream->done);
  }
  s.host_version++;
}

API void virtual_stop() {
  auto& s = state();
  {
    WithoutGil without;
    s.stopping = true;
    if (s.background.joinable()) s.background.join();
  }
  python_alive = false;
}

API const char* virtual_violations(int forget_from) {
  auto& s = state();
  Lock lock(s.mu);
  answer = "[";
  for (size_t i = 0; i < s.violations.size(); ++i) {
    auto& v = s.violations[i];
    if (i) answer += ",";
    answer += "{\"first\":" + as_json(v.first, v.first_kind) + ",\"second\":" + as_json(v.second, v.second_kind) +
        ",\"reused\":" + (v.reused ? "true" : "false") + ",\"bytes\":" + std::to_string(v.bytes) + ",\"times\":" + std::to_string(v.times) + "}";
  }
  answer += "]";
  if (forget_from >= 0 && static_cast<size_t>(forget_from) < s.violations.size()) {
    s.violations.resize(forget_from);
    for (auto it = s.known_violations.begin(); it != s.known_violations.end();)
      it = it->second >= static_cast<size_t>(forget_from) ? s.known_violations.erase(it) : std::next(it);
  }
  return answer.c_str();
}

API const char* virtual_synchronizations() {
  auto& s = state();
  Lock lock(s.mu);
  answer = "[";
  for (size_t i = 0; i < s.synchronizations.size(); ++i) {
    auto& r = s.synchronizations[i];
    if (i) answer += ",";
    answer += "{\"name\":" + json_text(r.name) + ",\"stack\":" + json_text(r.stack) + ",\"backward\":" + json_text(r.backward) +
        ",\"thread\":" + std::to_string(r.thread) + "}";
  }
  answer += "]";
  return answer.c_str();
}

// scope 0: this thread and backward passes; 1: every thread. on: 1 or -1.
API void virtual_forbid(int scope, int on) {
  auto& s = state();
  static std::atomic<int> here{0}, everywhere{0};
  if (scope == 0) {
    forbidden_here += on;
    here += on;
  } else {
    everywhere += on;
  }
  s.forbidden_everywhere = everywhere > 0 ? 1 : here > 0 ? -1 : 0;
}

API const char* virtual_pending() {
  answer = pending_text();
  return answer.c_str();
}

API uint64_t virtual_executed() {
  Lock lock(state().mu);
  return state().executed;
}

API void virtual_name_stream(int device, int64_t id, const char* name) {
  Lock lock(state().mu);
  state().streams.at(id == 0 ? device : static_cast<size_t>(id))->name = name;
}

API uint64_t virtual_rng(int device, int part) {
  auto* generator = static_cast<VirtualGenerator*>(default_generator(static_cast<DeviceIndex>(device)).unsafeGetGeneratorImpl());
  return part == 0 ? generator->current_seed() : generator->get_offset();
}

API void virtual_set_rng(int device, uint64_t seed, uint64_t offset) {
  auto* generator = static_cast<VirtualGenerator*>(default_generator(static_cast<DeviceIndex>(device)).unsafeGetGeneratorImpl());
  generator->set_current_seed(seed);
  generator->set_offset(offset);
}
