//! Which faults happen, and how often.

use super::Rng;

/// What goes wrong with one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not queued.
    Refused,
    /// One of its copies fails.
    CopyFails,
    /// One of its copies, and so its completion, does not end.
    NeverEnds,
    /// The device is lost while it is under way.
    DeviceLost,
    /// It all happens, and then an error is reported.
    ReportedLate,
}

/// Faults in a million submissions, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// [`Fault::Refused`].
    pub refused: u32,
    /// [`Fault::CopyFails`].
    pub copy_fails: u32,
    /// [`Fault::NeverEnds`]; also of device work that reads slots.
    pub never_ends: u32,
    /// [`Fault::DeviceLost`].
    pub device_lost: u32,
    /// [`Fault::ReportedLate`].
    pub reported_late: u32,
}

impl Faults {
    /// None.
    pub const NONE: Self = Self {
        refused: 0,
        copy_fails: 0,
        never_ends: 0,
        device_lost: 0,
        reported_late: 0,
    };

    /// Failures that can be retried are common, those that end the cache's life rare, so that lives are long enough
    /// to meet the others in many states.
    pub const MIXED: Self = Self {
        refused: 8_000,
        copy_fails: 8_000,
        never_ends: 150,
        device_lost: 150,
        reported_late: 300,
    };

    /// What happens to the next submission.
    pub fn draw(&self, rng: &mut Rng) -> Option<Fault> {
        [
            (self.refused, Fault::Refused),
            (self.copy_fails, Fault::CopyFails),
            (self.never_ends, Fault::NeverEnds),
            (self.device_lost, Fault::DeviceLost),
            (self.reported_late, Fault::ReportedLate),
        ]
        .into_iter()
        .find_map(|(rate, fault)| rng.millionths(rate).then_some(fault))
    }
}
