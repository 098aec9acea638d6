//! Work that was counted in schedules, kept: it is the same for any number of bytes, and counting
//! it means to make the schedule.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pleach_vocabulary::Collective;

use super::{Platform, Work};
use crate::generate::{Access, Algorithm, GenerateError, generate};
use crate::hosts::HostMap;

/// Most works that are kept; more are counted again each time. There are some tens a collective,
/// and as many again for each root that a caller names.
const KEPT_MAX: usize = 4096;

/// What work follows from.
type Made = (Collective, Algorithm, Access, HostMap);

/// What a platform and its clones have counted. Makes no difference but in time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted(Arc<Mutex<HashMap<Made, Work>>>);

impl PartialEq for Counted {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Platform {
    /// [`Work::between`] these hosts of what an algorithm makes.
    ///
    /// # Errors
    ///
    /// When it does not fit the collective or the ranks.
    pub(crate) fn counted(
        &self,
        collective: Collective,
        algorithm: &Algorithm,
        access: Access,
    ) -> Result<Work, GenerateError> {
        // Nothing is left half done in it by who panics.
        let kept = || self.counted.0.lock().unwrap_or_else(PoisonError::into_inner);
        let made = (collective, algorithm.clone(), access, self.hosts.clone());
        if let Some(work) = kept().get(&made) {
            return Ok(*work);
        }
        let work = Work::between(&generate(collective, algorithm, self.ranks(), access)?, &self.hosts);
        let mut kept = kept();
        if kept.len() < KEPT_MAX {
            kept.insert(made, work);
        }
        Ok(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_once_for_all_clones_and_again_for_other_hosts() {
        let platform = Platform::new(HostMap::one(6), Access::Mapped);
        let count = |platform: &Platform, access| {
            platform.counted(Collective::AllReduce, &Algorithm::Direct, access).expect("it fits")
        };
        let kept = || platform.counted.0.lock().expect("nobody panicked").len();
        let mapped = count(&platform, Access::Mapped);
        assert_eq!((count(&platform.clone(), Access::Mapped), kept()), (mapped, 1));
        assert_ne!(count(&platform, Access::Put), mapped);
        assert_eq!(kept(), 2);
        let mut apart = platform.clone();
        apart.hosts = "2x3".parse().expect("two hosts");
        let made = generate(Collective::AllReduce, &Algorithm::Direct, 6, Access::Put).expect("it fits");
        assert_eq!(count(&apart, Access::Put), Work::between(&made, &apart.hosts));
        assert_ne!(count(&apart, Access::Put), count(&platform, Access::Put));
        assert_eq!(kept(), 3);
    }
}
