//! How many members a session has, and how patient they are.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use pleach_collectives::Elastic;
use pleach_collectives::session::Heal;

use crate::result::{Failed, struct_size};

/// Processes that join read the states before their first step, for which the members wait.
pub const pleachHealBoundary: c_int = 0;
/// Processes that join read the states during their first step, in which they contribute nothing.
/// pleachSessionGetState waits for them on all members. For steps that only reduce.
pub const pleachHealHidden: c_int = 1;

/// How many members a session has, and how patient they are; the same on all members. Begin with
/// PLEACH_ELASTIC_INITIALIZER, which sets `size`. 0 and NULL stand for the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachElastic_t {
    /// sizeof(pleachElastic_t).
    pub size: usize,
    /// Steps are made by so many members or more; one unit by default.
    pub fewest: u32,
    /// Members at most; 64 by default, or the next lower multiple of `unit`.
    pub most: u32,
    /// After what silence a member is suspected, in milliseconds; 2000 by default.
    pub suspectAfterMs: u64,
    /// How long members that are too few to make a step wait for others, in milliseconds; 60000 by
    /// default.
    pub fewestWaitMs: u64,
    /// How long members that are too few to agree on the next epoch wait for others, in
    /// milliseconds; 20000 by default.
    pub quorumWaitMs: u64,
    /// How long members wait for a process that reads the states, in milliseconds; 60000 by
    /// default.
    pub healWaitMs: u64,
    /// How long enough ranks of a world wait for the others before they begin the job, in
    /// milliseconds; 10000 by default.
    pub beginWaitMs: u64,
    /// How often a step that cannot be ended is repeated by the same members; 3 by default.
    pub retriesMax: u32,
    /// When processes that join read the states: pleachHealBoundary by default, or
    /// pleachHealHidden.
    pub heal: c_int,
    /// So many seats make a unit, whose members come and go together: seats 0 to `unit - 1`, and so
    /// on. `fewest` and `most` are multiples of it. 1 by default.
    pub unit: u32,
    /// A name of the program, with all that has to be equal on all members. A process with another
    /// name does not join. The name of the executable by default.
    pub program: *const c_char,
}

/// Members at most, unless the caller says another number.
const MOST: u32 = 64;

/// Reads what the caller says; NULL says nothing.
///
/// # Safety
///
/// `given` is null, or points to a struct whose `size` is right and whose text ends with a zero
/// byte.
pub(crate) unsafe fn read(given: *const pleachElastic_t) -> Result<Elastic, Failed> {
    let usual = |number: u32, usual: u32| if number == 0 { usual } else { number };
    if given.is_null() {
        return Ok(Elastic::between(1, MOST));
    }
    // SAFETY: the caller's promise.
    unsafe { struct_size(given, "elastic", "PLEACH_ELASTIC_INITIALIZER") }?;
    // SAFETY: it is as long as its size says.
    let given = unsafe { *given };
    let heal = match given.heal {
        pleachHealBoundary => Heal::Boundary,
        pleachHealHidden => Heal::Hidden,
        other => {
            let remedy = "take pleachHealBoundary or pleachHealHidden";
            return Err(Failed::argument(format!("elastic->heal is {other}; {remedy}")));
        }
    };
    let unit = usual(given.unit, 1);
    let mut elastic = Elastic::between(usual(given.fewest, unit), usual(given.most, MOST - MOST % unit));
    elastic.unit = unit;
    elastic.heal = heal;
    elastic.retries_max = usual(given.retriesMax, elastic.retries_max);
    for (time, ms) in [
        (&mut elastic.suspect_after, given.suspectAfterMs),
        (&mut elastic.fewest_wait, given.fewestWaitMs),
        (&mut elastic.quorum_wait, given.quorumWaitMs),
        (&mut elastic.heal_wait, given.healWaitMs),
        (&mut elastic.begin_wait, given.beginWaitMs),
    ] {
        if ms != 0 {
            *time = Duration::from_millis(ms);
        }
    }
    if !given.program.is_null() {
        // SAFETY: the caller promises a text that ends with a zero byte.
        elastic.program = unsafe { CStr::from_ptr(given.program) }.to_string_lossy().into_owned();
    }
    Ok(elastic)
}
