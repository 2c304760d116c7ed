// One pool of threads of a host that reads a model's files, past the page cache where the file system lets it, and packs
// what it has read, or copies what was packed before. What is asked for is a job: pieces of files, each whole records of a matrix, and where their packed
// bytes go. Pieces of all jobs are read in turn into slots of memory of the reader's own, also before a job's place is
// free: that is read-ahead. Who runs a job says that its place is free and waits for it; its pieces come first from then
// on. Slots that read-ahead may not take are kept for these, so that nobody waits for a slot that waits for him.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "packing/crc32c.h"
#include "packing/pack.h"
#include "threads/reader.h"

namespace pshard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kBlock = 4096;    // of the file and in memory: no drive asks for more
constexpr int kKept = 2;            // slots that read-ahead leaves
constexpr double kNoteAfter = 10.0; // seconds without an answer

// As runtime/memory/disk/reader.py writes it. type: of the matrix; kCopy: bytes that lie in memory; kSkip: read, no more;
// kPacked: packed before. check: CRC32C of the bytes in the file, until they were found to be so; kUnchecked: none.
struct Piece {
  int64_t file, offset, nbytes, type, rows, cols, row_bytes, to, from, factor_at, factor, check;
};
static_assert(sizeof(Piece) == kPieceBytes);
constexpr int64_t kCopy = -1, kSkip = -2, kPacked = -3, kUnchecked = -1;

struct File {
  int fd;
  bool direct;
  int64_t size;
  std::string path;
};

// What a fake disk does instead: one clock for all reads, by which each is due.
struct Fake {
  double rate = 0, latency = 0, jitter = 0;
  int fault = 0;  // kEio, ...
  int64_t fault_at = 0;
};
enum Fault { kNone, kEio, kDead, kShort, kHang };

struct Job {
  Piece* pieces;
  int64_t count, next = 0, done = 0;
  uint8_t* to;
  bool begun = false, dropped = false, awaited = false;
  std::vector<std::pair<int64_t, int>> landed;  // piece and slot, until its place is free
};
using JobPtr = std::shared_ptr<Job>;

class Reader {
 public:
  Reader(int threads, int slots, int64_t slot_bytes, const Fake& fake, double patience)
      : depth_(threads), slot_bytes_(slot_bytes), fake_(fake), patience_(patience) {
    const size_t huge = 2 << 20, nbytes = slots * slot_bytes + huge;
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, nbytes, MADV_HUGEPAGE);  // a request has at most 254 segments: small pages halve the rate
    memory_ = memory, mapped_ = nbytes;
    base_ = reinterpret_cast<uint8_t*>(round_up<uintptr_t>(reinterpret_cast<uintptr_t>(memory), huge));
    std::memset(base_, 0, slots * slot_bytes);  // now, not in the first reads
    for (int i = 0; i < slots; ++i) free_.push_back(i);
    for (alive_ = 0; alive_ < threads; ++alive_) threads_.emplace_back([this] { work(); });
  }
  ~Reader() {
    for (auto& thread : threads_) thread.join();
    munmap(memory_, mapped_);
  }

  int add_file(int fd, bool direct, int64_t size, const char* path) {
    std::lock_guard<std::mutex> lock(mutex_);
    files_.push_back({fd, direct, size, path});
    return static_cast<int>(files_.size()) - 1;
  }

  JobPtr submit(Piece* pieces, int64_t count, uint8_t* to) {
    const JobPtr job = make_job(pieces, count, to);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(job), unread_ += count;
    }
    wake(count);
    return job;
  }

  // A job whose place is free, which comes before all that is read ahead; `wait` may be called for it again, or never.
  int64_t ask(Piece* pieces, int64_t count, uint8_t* to) {
    const JobPtr job = make_job(pieces, count, to);
    int64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      begin(*job);
      jobs_.push_back(job), unread_ += count;
      asked_[number = ++asks_] = job;
    }
    wake(count);
    return number;
  }
  void wait(int64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = asked_.find(number);
    if (found == asked_.end()) return;
    const JobPtr job = found->second;
    lock.unlock();
    run(job);
    lock.lock();
    asked_.erase(number);
  }

  // The job's place is free: returns when it is full, or the reader has failed.
  void run(const JobPtr& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!job->begun) wake(job->landed.size() + job->count - job->next);  // what is unread may take the slots that are kept
    begin(*job);
    for (const auto& landed : job->landed) packable_.push_back({job, landed.first, landed.second});
    job->landed.clear();
    last_ = Clock::now();
    bool noted = false;
    while (job->done < job->count && !job->dropped && failure_.empty()) {
      done_.wait_for(lock, std::chrono::milliseconds(200));
      const double idle = std::chrono::duration<double>(Clock::now() - last_).count();
      if (idle > std::min(kNoteAfter, patience_ / 2) && !noted && job->done < job->count) {
        noted = true;
        std::fprintf(stderr, "note: the disk has not answered for %.0f s: %s\n", idle, where(*job).c_str());
      }
      if (idle > patience_) fail("does not answer: " + where(*job));
    }
    drop(job);
  }

  void cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!jobs_.empty()) drop(jobs_.front());
    done_.notify_all();
  }

  std::string failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  int64_t bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

  // Seconds in which a job whose place was free was not full, and the bytes that were read meanwhile.
  std::pair<double, int64_t> waited() {
    std::lock_guard<std::mutex> lock(mutex_);
    return awaited_ ? std::make_pair(waited_ + since_begin(), waited_bytes_ + bytes_ - begin_bytes_)
                    : std::make_pair(waited_, waited_bytes_);
  }

  // False where a read does not come back in time: then threads and memory are left to the end of the process.
  bool stop(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    stop_ = true;
    work_.notify_all(), done_.notify_all();
    if (done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !alive_; })) return true;
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    return false;
  }

 private:
  struct Landed {
    JobPtr job;
    int64_t piece;
    int slot;
  };

  uint8_t* slot(int i) const { return base_ + i * slot_bytes_; }

  std::string where(const Job& job) const {
    const Piece& p = job.pieces[std::min(job.done, job.count - 1)];
    return p.from ? "memory" : files_[p.file].path + " at byte " + std::to_string(p.offset);
  }

  void fail(const std::string& why) {  // the first one stands
    if (failure_.empty()) failure_ = why;
    done_.notify_all();
  }

  static JobPtr make_job(Piece* pieces, int64_t count, uint8_t* to) {
    auto job = std::make_shared<Job>();
    job->pieces = pieces, job->count = count, job->to = to;
    return job;
  }

  // From now on the job's place is free, and somebody waits for it until it is full, or dropped.
  void begin(Job& job) {
    if (job.begun) return;
    job.begun = true;
    job.awaited = job.done < job.count;
    if (job.awaited && !awaited_++) begin_ = Clock::now(), begin_bytes_ = bytes_;
  }
  void finish(Job& job) {
    if (job.awaited && !--awaited_) waited_ += since_begin(), waited_bytes_ += bytes_ - begin_bytes_;
    job.awaited = false;
  }
  double since_begin() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

  // As many threads as there is something to do for: all at once would wait for each other.
  void wake(int64_t pieces) {
    for (int64_t i = std::min(pieces, depth_); i > 0; --i) work_.notify_one();
  }

  // Nothing more is read or written for the job; a thread that is at it has it still.
  void drop(const JobPtr& job) {
    const size_t free = free_.size();
    job->dropped = true;
    finish(*job);
    unread_ -= job->count - job->next;
    job->next = job->count;
    for (const auto& landed : job->landed)
      if (landed.second >= 0) free_.push_back(landed.second);
    job->landed.clear();
    for (auto it = packable_.begin(); it != packable_.end();) {
      if (it->job != job) {
        ++it;
        continue;
      }
      if (it->slot >= 0) free_.push_back(it->slot);
      it = packable_.erase(it);
    }
    for (auto it = jobs_.begin(); it != jobs_.end(); ++it)
      if (*it == job) {
        jobs_.erase(it);
        break;
      }
    wake(std::min<int64_t>(free_.size() - free, unread_));
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      if (!packable_.empty()) {
        const Landed landed = packable_.front();
        packable_.pop_front();
        pack(lock, landed);
      } else if (JobPtr job = choose()) {
        read(lock, job);
      } else {
        work_.wait(lock);
      }
    }
    --alive_;
    done_.notify_all();
  }

  // The job whose next piece is read: the first that somebody waits for, else the first of all.
  JobPtr choose() const {
    JobPtr first;
    if (!failure_.empty()) return first;
    for (const auto& job : jobs_)
      if (job->next < job->count) {
        if (job->begun && !free_.empty()) return job;
        if (!first) first = job;
      }
    return static_cast<int>(free_.size()) > kKept ? first : nullptr;
  }

  void read(std::unique_lock<std::mutex>& lock, const JobPtr& job) {
    const int64_t number = job->next++;
    --unread_;
    const Piece& piece = job->pieces[number];
    int at = -1;
    if (!piece.from) {
      at = free_.back(), free_.pop_back();
      const File file = files_[piece.file];
      const int64_t count = ++reads_;
      lock.unlock();
      std::string why = read_piece(file, piece, slot(at), count);
      if (why.empty() && !check_piece(job->pieces[number], slot(at))) why = "its bytes are not those that were packed (CRC32C)";
      lock.lock();
      last_ = Clock::now();
      if (!why.empty()) {
        free_.push_back(at);
        fail(file.path + " at byte " + std::to_string(piece.offset) + ": " + why);
        return;
      }
      bytes_ += piece.nbytes;
    }
    if (job->dropped) {
      if (at >= 0) free_.push_back(at);
    } else if (job->begun) {
      pack(lock, {job, number, at});
    } else {
      job->landed.push_back({number, at});
    }
  }

  void pack(std::unique_lock<std::mutex>& lock, const Landed& landed) {
    Job& job = *landed.job;
    const Piece& piece = job.pieces[landed.piece];
    lock.unlock();
    if (piece.type != kSkip) pack_piece(piece, landed.slot < 0 ? nullptr : slot(landed.slot), job.to + piece.to);
    lock.lock();
    if (landed.slot >= 0) free_.push_back(landed.slot), wake(std::min<int64_t>(1, unread_));
    if (++job.done < job.count) return;
    finish(job);
    done_.notify_all();
  }

  // Whether a piece is as it was packed. It is looked at when it is first read; several threads may do that.
  static bool check_piece(Piece& p, const uint8_t* read) {
    const int64_t wanted = __atomic_load_n(&p.check, __ATOMIC_RELAXED);
    if (wanted == kUnchecked) return true;
    if (crc32c(read + p.offset % kBlock, p.nbytes) != wanted) return false;
    __atomic_store_n(&p.check, kUnchecked, __ATOMIC_RELAXED);
    return true;
  }

  static void pack_piece(const Piece& p, const uint8_t* from, uint8_t* to) {
    if (p.type == kCopy) {
      std::memcpy(to, reinterpret_cast<const void*>(p.from), p.nbytes);
      return;
    }
    from += p.offset % kBlock;
    if (p.type == kPacked) {
      std::memcpy(to, from, p.nbytes);
      return;
    }
    const Matrix m(to, static_cast<int>(p.type), p.rows, p.cols);
    for (int64_t r = 0; r < m.records(); ++r) {
      uint8_t* record = to + r * m.record;
      pack_record(m.type, from + r * 16 * p.row_bytes, p.row_bytes, m.rows_of(r), p.cols, record);
      if (p.factor_at >= 0)
        for (int i = 0; i < 16; ++i) std::memcpy(record + p.factor_at + 4 * i, &p.factor, 4);
    }
  }

  // Why it could not be read; empty where it was.
  std::string read_piece(const File& file, const Piece& p, uint8_t* to, int64_t count) {
    const int64_t begin = p.offset / kBlock * kBlock, end = std::min(round_up(p.offset + p.nbytes, kBlock), file.size);
    if (p.offset + p.nbytes > file.size) return "lies beyond the end of the file";
    Clock::time_point due{};
    if (fake_.rate > 0) due = wait_turn(end - begin);
    const Fault fault = fake_.fault && (count == fake_.fault_at || (fake_.fault == kDead && count > fake_.fault_at))
                            ? static_cast<Fault>(fake_.fault)
                            : kNone;
    if (fault == kHang) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [&] { return stop_; });
      return "does not answer";
    }
    for (int64_t at = begin, tries = 0; at < end;) {
      const int64_t wanted = round_up(end - at, kBlock);
      ssize_t got = pread(file.fd, to + (at - begin), wanted, at);
      if ((fault == kEio && !tries) || fault == kDead) got = -1, errno = EIO;
      if (fault == kShort) got = 0;
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EIO && !tries++) continue;
      if (got < 0) return std::strerror(errno);
      if (!got || (at + got < end && got < kBlock)) return "was cut while in use";
      at += at + got < end ? got / kBlock * kBlock : got;  // what follows begins at a block again
    }
    if (!file.direct && fake_.rate <= 0) posix_fadvise(file.fd, begin, end - begin, POSIX_FADV_DONTNEED);
    if (fake_.rate > 0) std::this_thread::sleep_until(due);
    return "";
  }

  Clock::time_point wait_turn(int64_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto seconds = [](double s) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)); };
    idle_ = std::max(idle_, Clock::now()) + seconds(nbytes / fake_.rate);
    const double late = fake_.jitter * std::uniform_real_distribution<double>(0, 1)(random_);
    return idle_ + seconds(fake_.latency + late);
  }

  const int64_t depth_, slot_bytes_;  // depth_: threads, and so reads under way
  const Fake fake_;
  const double patience_;
  void* memory_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* base_ = nullptr;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<JobPtr> jobs_;  // those whose place is not full yet
  std::map<int64_t, JobPtr> asked_;  // by number, until somebody has waited for them
  std::deque<Landed> packable_;
  std::vector<int> free_;  // slots
  std::deque<File> files_;
  std::vector<std::thread> threads_;
  std::string failure_;
  int64_t bytes_ = 0, reads_ = 0, asks_ = 0, unread_ = 0;  // unread_: pieces that nobody has begun to read
  int64_t awaited_ = 0, begin_bytes_ = 0, waited_bytes_ = 0;  // awaited_: jobs that somebody waits for, since begin_
  double waited_ = 0;
  int alive_ = 0;
  bool stop_ = false;
  Clock::time_point last_ = Clock::now(), idle_ = Clock::now(), begin_;
  std::mt19937_64 random_{1};
};

struct Ticket {
  Reader* reader;
  JobPtr job;
};

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void* pshard_reader_open(int threads, int slots, int64_t slot_bytes, double rate, double latency,
                                    double jitter, int fault, int64_t fault_at, double patience) {
  try {
    return new Reader(threads, slots, slot_bytes, {rate, latency, jitter, fault, fault_at}, patience);
  } catch (const std::exception&) {
    return nullptr;
  }
}
PSHARD_API int pshard_reader_file(void* reader, int fd, int direct, int64_t size, const char* path) {
  return static_cast<Reader*>(reader)->add_file(fd, direct, size, path);
}
// A job that pshard_reader_run is called with later, once; `pieces` live until then.
PSHARD_API void* pshard_reader_submit(void* reader, void* pieces, int64_t count, void* to) {
  auto* r = static_cast<Reader*>(reader);
  return new Ticket{r, r->submit(static_cast<Piece*>(pieces), count, static_cast<uint8_t*>(to))};
}
PSHARD_API void pshard_reader_run(void* ticket) {
  const std::unique_ptr<Ticket> todo(static_cast<Ticket*>(ticket));
  todo->reader->run(todo->job);
}
// The number of a job whose place is free, for pshard_reader_wait; `pieces` live until that has returned.
PSHARD_API int64_t pshard_reader_ask(void* reader, void* pieces, int64_t count, void* to) {
  return static_cast<Reader*>(reader)->ask(static_cast<Piece*>(pieces), count, static_cast<uint8_t*>(to));
}
PSHARD_API void pshard_reader_wait(void* reader, int64_t number) { static_cast<Reader*>(reader)->wait(number); }
PSHARD_API void pshard_reader_cancel(void* reader) { static_cast<Reader*>(reader)->cancel(); }
PSHARD_API int64_t pshard_reader_bytes(void* reader) { return static_cast<Reader*>(reader)->bytes(); }
// Seconds in which somebody waited for a job; returns the bytes that were read meanwhile.
PSHARD_API int64_t pshard_reader_waited(void* reader, double* seconds) {
  const auto [waited, bytes] = static_cast<Reader*>(reader)->waited();
  *seconds = waited;
  return bytes;
}
// Writes why the reader has failed; returns its length, 0 where it has not.
PSHARD_API int pshard_reader_failure(void* reader, char* out, int64_t nbytes) {
  const std::string why = static_cast<Reader*>(reader)->failure();
  std::snprintf(out, nbytes, "%s", why.c_str());
  return static_cast<int>(why.size());
}
PSHARD_API void pshard_reader_close(void* reader, double seconds) {
  auto* r = static_cast<Reader*>(reader);
  if (r->stop(seconds)) delete r;
}
