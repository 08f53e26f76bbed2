// What ranks see of each other: the layout of shared memory.
//
// Every rank owns one arena (a memfd that all peers map). At its start stands a directory of the groups this rank has
// joined; a group's Control block is an ordinary block of the arena. A rank writes its own slots and, in the blocks of
// its peers, the signals that it raises for them. All words are 64-bit atomics; a word that several ranks poll or that
// crosses cores has a cache line of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dovetail {

inline constexpr uint64_t kMagic = 0x31304c4941545644ull;  // "DVTAIL01"
inline constexpr int kLanes = 4;                            // runs of one group in flight
inline constexpr int kSignals = 512;                        // per lane and rank
inline constexpr int kPosted = 3;                           // buffers that a slot names: input, output, scratch
inline constexpr int kDirectory = 2048;                     // groups per rank over its life
inline constexpr int kPurpose = 64;                       // bytes of a text
inline constexpr int kValueBits = 20;                       // signal value = (run << kValueBits) + v

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free);

struct alignas(64) Line {
  Word word;
};

// What a rank says when it enters a run. Two per lane: a rank may post run k+kLanes while a peer still reads run k,
// never k+2*kLanes, since it must first have seen that peer enter k+kLanes.
struct alignas(64) Slot {
  Word run;                // written last, with release
  uint64_t call;           // collective, dtype, reduction, variant, root: must agree
  uint64_t size_bytes;     // must agree
  uint64_t offset[kPosted];  // in the poster's arena; kNowhere if it is not there
  uint32_t flags;
  uint32_t num_params;
  uint64_t reserved;
};
static_assert(sizeof(Slot) == 64);
inline constexpr uint64_t kNowhere = ~0ull;
inline constexpr uint64_t kPlanCall = 0xff;  // the low byte of `call`: a plan by itself; collectives have other numbers
inline constexpr uint32_t kOnHeap = 1;   // flag: all its tensors are on the heap
inline constexpr uint32_t kStaged = 2;   // flag: its input is not, peers read the scratch ring
inline constexpr uint32_t kMain = 4;     // flag: its main thread waits for the run
inline constexpr uint32_t kShort = 8;    // flag: one of its buffers is smaller than the plan takes it to be

// Group-wide end: who broke the group, and why. Any rank writes it into every member's block, once.
enum class Abort : uint8_t { None = 0, Dead = 1, Late = 2, Closed = 3, Failed = 4, Crossed = 5 };

struct Control {
  Line abort;                     // code | rank << 8 | reporter << 24; see abort_word()
  Line acknowledged;              // the owner has seen the abort and touches nobody's memory any more
  Line met;                       // the owner has found the blocks of all members
  Line joining;                   // key of the companion of this group that the owner is joining, or 0
  Word joins_in_main;             // its main thread does
  char purpose[kPurpose];         // what for, as text
  alignas(64) Word finished[kLanes];   // the last run of each lane that this rank has finished
  Word parked[kLanes];            // run << 32 | queue << 20 | step: where it waits, for a peer's error message
  Slot slots[2 * kLanes];
  uint64_t sizes[2 * kLanes][kPosted];  // bytes of the posted buffers
  Line signals[kLanes][kSignals];
  // int64 params[2 * kLanes][max_params] follow
  int64_t* params(int slot, int max_params) {
    return reinterpret_cast<int64_t*>(this + 1) + static_cast<ptrdiff_t>(slot) * max_params;
  }
  static size_t bytes(int max_params) { return sizeof(Control) + sizeof(int64_t) * 2 * kLanes * max_params; }
};

struct Entry {
  Word key;  // written last
  uint64_t offset;
};

struct Header {
  uint64_t magic;
  uint64_t arena_bytes;
  Word num_groups;
  Entry directory[kDirectory];
};

inline uint64_t abort_word(Abort code, int rank, int reporter) {
  return static_cast<uint64_t>(code) | static_cast<uint64_t>(static_cast<uint16_t>(rank)) << 8 |
         static_cast<uint64_t>(static_cast<uint16_t>(reporter)) << 24;
}

}  // namespace dovetail
