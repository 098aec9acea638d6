//! Hosts, as the devices of a job tell them apart.
//!
//! The address of a hybrid device begins with its host, so both ends of a pair decide alike which
//! fabric joins them, whenever they connect. The processes that begin a job have found their hosts
//! together. A process that comes later looks whether the shared memory of a member is on its host,
//! and takes the host of that member. Where there is none, it is the first process of a host.

use std::fmt;
use std::hash::Hasher;

use pleach_vocabulary::digest::Hasher64;
use rustix::io::Errno;

use crate::auth::random_bytes;
use crate::control::packet;
use crate::device::Address;

const SCHEME: &str = "host:";

/// The host of a process. Processes of equal hosts share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostId {
    number: u32,
    /// Of `PLEACH_HOST`; zero without one.
    name_hash: u64,
}

impl HostId {
    /// The host of this number in its job. It goes by a name of its own (`PLEACH_HOST`) or by none.
    #[must_use]
    pub fn new(number: u32, name: Option<&str>) -> Self {
        Self { number, name_hash: name.map_or(0, hash) }
    }

    /// Its number in the job.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// The host of the device with this address; `None`: the device is of one fabric.
    #[must_use]
    pub fn of(address: &Address) -> Option<Self> {
        let (number, name_hash) = address.0.split(' ').next()?.strip_prefix(SCHEME)?.split_once('-')?;
        let number = u32::from_str_radix(number, 16).ok()?;
        Some(Self { number, name_hash: u64::from_str_radix(name_hash, 16).ok()? })
    }

    /// The host of this process, which comes to a job whose members have these addresses: that of a
    /// member beside it, or another one.
    pub(crate) fn among(members: &[Address], name: Option<&str>) -> Self {
        let name_hash = name.map_or(0, hash);
        let hosts = || members.iter().filter_map(|address| Some((Self::of(address)?, address)));
        let beside = hosts().find(|(host, address)| host.name_hash == name_hash && is_beside(address));
        if let Some((host, _)) = beside {
            return host;
        }
        // Another process that comes now may be on a host of its own too, so the number is random.
        loop {
            let number = u32::from_ne_bytes(random_bytes());
            if hosts().all(|(host, _)| host.number != number) {
                return Self { number, name_hash };
            }
        }
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{SCHEME}{:x}-{:x}", self.number, self.name_hash)
    }
}

fn hash(name: &str) -> u64 {
    let mut hasher = Hasher64::default();
    hasher.write(name.as_bytes());
    hasher.finish()
}

/// Whether the device with this address listens on this host, as this user: its socket is reached,
/// and a socket that is reached passes memory. The device drops the connection, which says nothing.
fn is_beside(address: &Address) -> bool {
    let listener = address.0.split(' ').find_map(packet::parse_text);
    listener.is_some_and(|listener| match packet::dial(listener) {
        Ok(stream) => packet::is_same_user(&stream),
        // It is there, and many others ask at the same time.
        Err(errno) => errno == Errno::WOULDBLOCK,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::other_user::{as_nobody, can_act_as_nobody};

    #[test]
    fn a_host_is_read_from_the_address_of_its_device() {
        for host in [HostId::new(0, None), HostId::new(u32::MAX, Some("rack 1"))] {
            assert_eq!(HostId::of(&Address(format!("{host} shm:aa tcp:127.0.0.1:1"))), Some(host));
        }
        assert_ne!(HostId::new(1, Some("a")), HostId::new(1, Some("b")));
        for text in
            ["", "tcp:127.0.0.1:1", "shm:aa tcp:127.0.0.1:1", "host:", "host:1", "host:x-0", "host:1-x"]
        {
            assert_eq!(HostId::of(&Address(text.to_owned())), None, "{text}");
        }
    }

    #[test]
    fn who_comes_is_on_the_host_of_the_member_beside_it_or_on_another_one() {
        let (listener, beside) = packet::bind_anywhere().expect("the system gives a socket");
        let (gone, elsewhere) = packet::bind_anywhere().expect("the system gives a socket");
        drop(gone);
        let at = |host: HostId, part: &Address| Address(format!("{host} {part} tcp:127.0.0.1:1"));
        let (here, other) = (HostId::new(3, None), HostId::new(1, None));
        let members = [at(other, &elsewhere), at(here, &elsewhere), at(here, &beside)];
        assert_eq!(HostId::among(&members, None), here, "also where a member has just gone");
        let another = HostId::among(&members[..2], None);
        assert!(another != here && another != other);
        let named = HostId::among(&members, Some("rack 1"));
        assert_ne!(named, here, "it goes by another name");
        assert_eq!(HostId::among(&[at(named, &beside)], Some("rack 1")), named);
        if can_act_as_nobody() {
            assert_ne!(as_nobody(|| HostId::among(&members, None)), here, "another user maps nothing");
        }
        drop(listener);
    }
}
