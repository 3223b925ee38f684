//! The simulated device.

use std::collections::VecDeque;

use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::observe::Counter;
use horizon_core::provider::SlotAddress;
use horizon_core::transport::{
    Completion, Copy, Moment, Publish, SlotId, StagingId, Transport, TransportError,
};

use super::Rng;
use super::checker::Checker;
use super::faults::{Fault, Faults};
use crate::generation::{Census, LayerMap};
use crate::sync::{Mutex, lock};

/// Virtual time that a copy of one record keeps the link busy.
const COPY_TIME: u64 = 100;
/// Virtual time after which [`Transport::wait`] gives up.
const DEADLINE: u64 = 1_000_000;
const POISON: u8 = 0xFF;

/// A device in virtual time. Its methods beyond [`Transport`] are the tests' view of it.
pub struct SimTransport {
    state: Mutex<State>,
    slots: usize,
    staging: usize,
    record_bytes: usize,
    read_back: Counter,
}

struct State {
    now: u64,
    rng: Rng,
    faults: Faults,
    /// What happens to the submissions to come, before `faults` decides.
    next: VecDeque<Option<Fault>>,
    slots: Vec<Vec<u8>>,
    staging: Vec<Vec<u8>>,
    /// By completion, from 1.
    marks: Vec<Mark>,
    /// Time, order of entry, what.
    events: Vec<(u64, u64, Event)>,
    entered: u64,
    link_free: u64,
    /// When the last submission's completion retires.
    last_retires: u64,
    /// A submission does not end: no later one retires.
    stuck: bool,
    /// When the device's work that reads slots will have ended: it runs in order, too.
    work_ends: u64,
    work_stuck: bool,
    lost: bool,
    injected: Injected,
    checker: Checker,
}

/// Faults that have happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Injected {
    /// That leave nothing in doubt.
    pub retryable: u64,
    /// That leave something in doubt.
    pub ambiguous: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    Pending { publishes: bool },
    Never,
    Done,
    Failed(Moment),
}

enum Event {
    CopyStarts(Copy),
    CopyEnds(Copy, bool),
    Publishes(Publish),
    Retires(usize, Mark),
    ReadEnds(SlotId, usize, ExpertId),
    Lost,
}

impl SimTransport {
    /// A device with the checker's geometry and `staging` buffers, all slots poisoned. Nothing fails until
    /// [`inject`](Self::inject).
    #[must_use]
    pub fn new(slots: usize, staging: usize, record_bytes: usize, checker: Checker, seed: u64) -> Self {
        Self {
            slots,
            staging,
            record_bytes,
            read_back: Counter::new(),
            state: Mutex::new(State {
                now: 0,
                rng: Rng::new(seed),
                faults: Faults::NONE,
                next: VecDeque::new(),
                slots: vec![vec![POISON; record_bytes]; slots],
                staging: vec![vec![0; record_bytes]; staging],
                marks: Vec::new(),
                events: Vec::new(),
                entered: 0,
                link_free: 0,
                last_retires: 0,
                stuck: false,
                work_ends: 0,
                work_stuck: false,
                lost: false,
                injected: Injected::default(),
                checker,
            }),
        }
    }

    /// From now on these faults happen.
    pub fn inject(&self, faults: Faults) {
        lock(&self.state).faults = faults;
    }

    /// What happens to the next submissions.
    pub fn plan(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        lock(&self.state).next.extend(faults);
    }

    /// Faults that have happened.
    #[must_use]
    pub fn injected(&self) -> Injected {
        lock(&self.state).injected
    }

    /// The cache has been admitted with `maps`.
    pub fn admitted(&self, maps: &[LayerMap]) {
        let state = &mut *lock(&self.state);
        state.checker.admitted(maps, &state.slots);
    }

    /// Lets virtual time pass.
    pub fn advance(&self, time: u64) {
        let mut state = lock(&self.state);
        let to = state.now + time;
        state.advance(to);
    }

    /// Device work, after the work before, that reads `reads` (slot, layer, expert) and takes `time`; checked at its
    /// end, byte by byte.
    pub fn work(&self, reads: &[(SlotAddress, usize, ExpertId)], time: u64) -> Completion {
        let mut state = lock(&self.state);
        let never = state.faults.never_ends;
        if state.lost {
            return state.mark(Mark::Failed(Moment::AfterPublication));
        }
        if state.rng.millionths(never) {
            state.injected.ambiguous += 1;
            state.work_stuck = true;
        }
        if state.work_stuck {
            return state.mark(Mark::Never);
        }
        let completion = state.mark(Mark::Pending { publishes: true });
        let end = state.now.max(state.work_ends) + time;
        state.work_ends = end;
        for (address, layer, expert) in reads {
            let slot = slot_of(*address);
            state.assert_shows(slot, *layer, *expert);
            state.checker.device_reads(slot, 1);
            state.enter(end, Event::ReadEnds(slot, *layer, *expert));
        }
        let index = state.marks.len() - 1;
        state.enter(end, Event::Retires(index, Mark::Done));
        completion
    }

    /// A reader looks at every byte of a leased slot.
    ///
    /// # Panics
    /// When it is not the host store's record of the expert.
    pub fn assert_shows(&self, address: SlotAddress, layer: usize, expert: ExpertId) {
        lock(&self.state).assert_shows(slot_of(address), layer, expert);
    }

    /// The bytes of a slot, not counted as a read-back.
    #[must_use]
    pub fn bytes(&self, slot: SlotId) -> Vec<u8> {
        lock(&self.state).slots[slot.index()].clone()
    }

    /// Whether a slot holds nothing but poison.
    #[must_use]
    pub fn is_poisoned(&self, slot: SlotId) -> bool {
        self.bytes(slot).iter().all(|b| *b == POISON)
    }

    /// Somebody holds `generation`.
    pub fn hold(&self, generation: u64) {
        lock(&self.state).checker.hold(generation);
    }

    /// One holder of `generation` less.
    pub fn let_go(&self, generation: u64) {
        lock(&self.state).checker.let_go(generation);
    }

    /// Whether the device has been lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        lock(&self.state).lost
    }

    /// See [`Checker::shows`].
    #[must_use]
    pub fn shows(&self, generation: u64, layer: usize, group: &[ExpertId]) -> bool {
        lock(&self.state).checker.shows(generation, layer, group)
    }

    /// See [`Checker::missing`].
    #[must_use]
    pub fn missing(&self, layer: usize, group: &[ExpertId]) -> usize {
        lock(&self.state).checker.missing(layer, group)
    }

    /// Submissions so far, those of device work included.
    #[must_use]
    pub fn submissions(&self) -> usize {
        lock(&self.state).marks.len()
    }

    /// Checks where all slots are; see [`Checker::conserved`].
    pub fn conserved(&self, maps: &[LayerMap], census: &Census) {
        lock(&self.state).checker.conserved(maps, census);
    }

    /// See [`Checker::retiring_are_read`].
    pub fn retiring_are_read(&self, census: &Census) {
        lock(&self.state).checker.retiring_are_read(census);
    }
}

fn slot_of(address: SlotAddress) -> SlotId {
    SlotId(u32::try_from(address.offset).expect("addresses are slot numbers"))
}

fn failed(moment: Moment, reason: &str) -> TransportError {
    TransportError {
        moment,
        reason: reason.into(),
    }
}

impl State {
    fn mark(&mut self, mark: Mark) -> Completion {
        self.marks.push(mark);
        Completion(self.marks.len() as u64)
    }

    fn enter(&mut self, time: u64, event: Event) {
        self.entered += 1;
        self.events.push((time, self.entered, event));
    }

    fn assert_shows(&self, slot: SlotId, layer: usize, expert: ExpertId) {
        assert!(
            self.slots[slot.index()] == self.checker.record(layer, expert),
            "{slot:?} does not show {expert} of routed layer {layer}"
        );
    }

    fn advance(&mut self, to: u64) {
        loop {
            let next = self.events.iter().enumerate().min_by_key(|(_, e)| (e.0, e.1));
            match next.map(|(i, e)| (i, e.0)) {
                Some((i, time)) if time <= to => {
                    let (time, _, event) = self.events.swap_remove(i);
                    self.now = self.now.max(time);
                    self.happen(event);
                }
                _ => break,
            }
        }
        self.now = self.now.max(to);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::CopyStarts(copy) => self.half(copy, false),
            Event::CopyEnds(copy, well) => {
                if well {
                    self.half(copy, true);
                }
                self.checker.copies(copy.staging.index(), -1);
            }
            Event::Publishes(publish) => self.checker.publish(&publish, &self.slots),
            Event::Retires(index, mark) => self.marks[index] = mark,
            Event::ReadEnds(slot, layer, expert) => {
                self.assert_shows(slot, layer, expert);
                self.checker.device_reads(slot, -1);
            }
            Event::Lost => self.lose(),
        }
    }

    /// Moves the first or the second half of a record.
    fn half(&mut self, copy: Copy, second: bool) {
        self.checker.write(copy.slot);
        self.checker.filled(copy.slot);
        let (from, to) = (
            &self.staging[copy.staging.index()],
            &mut self.slots[copy.slot.index()],
        );
        let middle = from.len() / 2;
        let range = if second { middle..from.len() } else { 0..middle };
        to[range.clone()].copy_from_slice(&from[range]);
    }

    fn lose(&mut self) {
        self.lost = true;
        self.events.clear();
        self.checker.lost();
        for mark in &mut self.marks {
            *mark = match *mark {
                Mark::Pending { publishes: false } => Mark::Failed(Moment::BeforePublication),
                Mark::Pending { publishes: true } | Mark::Never => Mark::Failed(Moment::AfterPublication),
                ended => ended,
            };
        }
    }

    fn submit(&mut self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        if self.lost {
            return Err(failed(Moment::BeforePublication, "the device is lost"));
        }
        let fault = match self.next.pop_front() {
            Some(planned) => planned,
            None => self.faults.draw(&mut self.rng),
        };
        match fault {
            Some(Fault::Refused | Fault::CopyFails) => self.injected.retryable += 1,
            Some(_) => self.injected.ambiguous += 1,
            None => {}
        }
        if fault == Some(Fault::Refused) {
            return Err(failed(Moment::BeforePublication, "the queue is full"));
        }
        let bad = self.rng.within(0, copies.len().saturating_sub(1));
        let mut end = self.now;
        for (i, copy) in copies.iter().enumerate() {
            end = end.max(self.copy(*copy, fault.filter(|_| i == bad)));
        }
        if fault == Some(Fault::NeverEnds) {
            self.stuck = true;
        }
        if self.stuck {
            return Ok(self.mark(Mark::Never));
        }
        let publishes = then.is_some();
        let outcome = match fault {
            Some(Fault::CopyFails) => Mark::Failed(Moment::BeforePublication),
            Some(Fault::ReportedLate) => Mark::Failed(Moment::AfterPublication),
            _ => Mark::Done,
        };
        if fault == Some(Fault::DeviceLost) {
            let time = self.rng.below(2 * (end - self.now) + 2);
            let at = self.now + time;
            self.enter(at, Event::Lost);
        }
        if let Some(publish) = then
            && fault != Some(Fault::CopyFails)
        {
            self.enter(end + 1, Event::Publishes(publish));
        }
        self.last_retires = self.last_retires.max(end + 2);
        let completion = self.mark(Mark::Pending { publishes });
        let index = self.marks.len() - 1;
        self.enter(self.last_retires, Event::Retires(index, outcome));
        Ok(completion)
    }

    /// Queues one copy and gives its end.
    fn copy(&mut self, copy: Copy, fault: Option<Fault>) -> u64 {
        let start = self.now.max(self.link_free);
        self.link_free = start + COPY_TIME;
        let end = self.link_free + self.rng.below(3 * COPY_TIME);
        self.checker.copies(copy.staging.index(), 1);
        self.enter(start, Event::CopyStarts(copy));
        match fault {
            // Long after everybody has given up on it.
            Some(Fault::NeverEnds) => {
                let late = self.rng.below(3 * DEADLINE);
                self.enter(end + DEADLINE + late, Event::CopyEnds(copy, true));
            }
            _ => self.enter(end, Event::CopyEnds(copy, fault != Some(Fault::CopyFails))),
        }
        end
    }
}

impl Transport for SimTransport {
    fn name(&self) -> &'static str {
        "simulation"
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn staging_buffers(&self) -> usize {
        self.staging
    }

    fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    fn address(&self, slot: SlotId) -> SlotAddress {
        SlotAddress {
            buffer: 0,
            offset: u64::from(slot.0),
        }
    }

    fn stage(&self, buffer: StagingId, record: &[u8]) {
        let mut state = lock(&self.state);
        // Staging takes time, in which copies go on.
        let time = state.now + COPY_TIME / 2;
        state.checker.stage(buffer.index());
        state.advance(time);
        state.staging[buffer.index()].copy_from_slice(record);
    }

    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        lock(&self.state).submit(copies, then)
    }

    fn wait(&self, completion: Completion) -> Result<(), TransportError> {
        let mut state = lock(&self.state);
        loop {
            match state.outcome(completion) {
                Mark::Done => return Ok(()),
                Mark::Failed(moment) => return Err(failed(moment, "the copy failed")),
                Mark::Never => {
                    let deadline = state.now + DEADLINE;
                    state.advance(deadline);
                    return Err(failed(Moment::AfterPublication, "the deadline has passed"));
                }
                Mark::Pending { .. } => {
                    let next = state.events.iter().map(|e| e.0).min();
                    state.advance(next.expect("what is pending has an event"));
                }
            }
        }
    }

    fn poll(&self, completion: Completion) -> Result<bool, TransportError> {
        let mut state = lock(&self.state);
        let soon = state.now + 1;
        state.advance(soon);
        match state.outcome(completion) {
            Mark::Done => Ok(true),
            Mark::Failed(moment) => Err(failed(moment, "the work failed")),
            Mark::Never | Mark::Pending { .. } => Ok(false),
        }
    }

    fn poison(&self, slot: SlotId) {
        let mut state = lock(&self.state);
        state.checker.write(slot);
        state.checker.poisoned(slot);
        state.slots[slot.index()].fill(POISON);
    }

    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        let bytes = self.bytes(slot);
        self.read_back.add(bytes.len() as u64);
        bytes
    }

    fn read_back_bytes(&self) -> u64 {
        self.read_back.get()
    }
}

impl State {
    fn outcome(&self, completion: Completion) -> Mark {
        match usize::try_from(completion.0).expect("completions are few") {
            0 => Mark::Done,
            n => self.marks[n - 1],
        }
    }
}

/// The layers of a geometry with `n` routed layers: every other one, from 1, so that positions are not numbers.
#[must_use]
pub fn layers(n: usize) -> Vec<LayerId> {
    (0u32..).map(|l| LayerId(2 * l + 1)).take(n).collect()
}
