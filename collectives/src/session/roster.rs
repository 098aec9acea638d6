//! Where processes are: what is known of those that may be connected to.

use std::collections::BTreeMap;

use pleach_membership::{Process, Record, put_process, take_process};
use pleach_transport::hybrid::HostId;
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::{Address, listening_address_of};
use pleach_vocabulary::Rank;

use crate::group::Place;

/// Bytes of an address at most.
const ADDRESS_BYTES_MAX: usize = 2048;

/// A process, and where it is. Members pass it on as it is, so all know the same of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Neighbour {
    process: Process,
    /// The number of its host.
    host: u32,
    /// Ranks for each processor that it may run on.
    ranks_a_processor: u32,
    address: Address,
}

impl Neighbour {
    pub(crate) fn new(process: Process, host: u32, ranks_a_processor: u32, address: Address) -> Self {
        Self { process, host, ranks_a_processor, address }
    }

    pub(crate) fn process(&self) -> Process {
        self.process
    }

    /// Its rank of the device.
    pub(crate) fn rank(&self) -> Rank {
        self.process.seat.0
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The address of its host, where it listens on one that others reach, or else the host's
    /// number.
    pub(crate) fn host_shown(&self) -> String {
        match listening_address_of(&self.address) {
            Some(ip) if !ip.is_loopback() => ip.to_string(),
            _ => self.host.to_string(),
        }
    }

    fn place(&self) -> Place {
        Place::new(self.rank(), self.host, self.ranks_a_processor)
    }

    pub(crate) fn put(&self, writer: Writer) -> Writer {
        let Self { process, host, ranks_a_processor, address } = self;
        put_process(writer, *process).u32(*host).u32(*ranks_a_processor).bytes(address.0.as_bytes())
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let process = take_process(reader)?;
        let (host, ranks_a_processor) = (reader.u32()?, reader.u32()?);
        let address = Address(reader.text(ADDRESS_BYTES_MAX)?);
        Ok(Self { process, host, ranks_a_processor, address })
    }
}

/// What a process knows of the places of members and of those that wait to join.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roster(BTreeMap<Process, Neighbour>);

impl Roster {
    pub(crate) fn new(neighbours: impl IntoIterator<Item = Neighbour>) -> Self {
        Self(neighbours.into_iter().map(|neighbour| (neighbour.process, neighbour)).collect())
    }

    pub(crate) fn insert(&mut self, neighbour: Neighbour) {
        self.0.insert(neighbour.process, neighbour);
    }

    pub(crate) fn contains(&self, process: Process) -> bool {
        self.0.contains_key(&process)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Neighbour> {
        self.0.values()
    }

    /// A newcomer, of which this roster was told. Its host is the one that its address names. Where
    /// it names none, it is that of those who listen on the same address, or one of its own. The
    /// newcomer and who gives seats make it of the same roster, and all others are told, so all
    /// know the same of it.
    pub(crate) fn newcomer(&self, process: Process, address: Address, seats: u32) -> Neighbour {
        let ip = listening_address_of(&address);
        let beside = self.0.values().find(|neighbour| listening_address_of(&neighbour.address) == ip);
        let is_taken = |host: &u32| self.0.values().any(|neighbour| neighbour.host == *host);
        let new = || (seats..).find(|host| !is_taken(host)).expect("there are fewer hosts than numbers");
        let host = match HostId::of(&address) {
            Some(host) => host.number(),
            None => beside.map_or_else(new, |neighbour| neighbour.host),
        };
        let share = self.0.values().map(|neighbour| neighbour.ranks_a_processor).max();
        Neighbour::new(process, host, share.unwrap_or(1), address)
    }

    /// Forgets all that are neither members nor kept.
    pub(crate) fn keep(&mut self, record: &Record, keeps: impl Fn(Process) -> bool) {
        self.0.retain(|process, _| record.contains(*process) || keeps(*process));
    }

    /// The places of the members, by rank of the epoch. Who connected to a member was told of it,
    /// so each is there.
    pub(crate) fn places(&self, record: &Record) -> Option<Vec<Place>> {
        record.members().iter().map(|member| self.0.get(member).map(Neighbour::place)).collect()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default().u32(self.0.len() as u32);
        self.0.values().fold(writer, |writer, neighbour| neighbour.put(writer)).finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        // Each neighbour takes bytes, so their number is bounded by the bytes that are there.
        let count = (reader.u32()? as usize).min(bytes.len());
        let neighbours = (0..count).map(|_| Neighbour::take(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        reader.end()?;
        Ok(Self::new(neighbours))
    }
}

/// Decodes bytes as a roster, and what decodes once more: for fuzzing.
pub(crate) fn check_decoder(bytes: &[u8]) {
    if let Ok(roster) = Roster::decode(bytes) {
        let again = Roster::decode(&roster.encode()).expect("it is a roster's");
        assert!(again.iter().eq(roster.iter()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_is_on_the_host_of_those_who_listen_on_its_address() {
        let at = |seat: u32, host: u32, address: &str| {
            Neighbour::new(Process::new(seat, 1), host, seat + 1, Address(address.to_owned()))
        };
        let place = |roster: &Roster, address: &str| {
            let newcomer = roster.newcomer(Process::new(5, 1), Address(address.to_owned()), 8);
            (newcomer.host, newcomer.ranks_a_processor)
        };
        let roster = Roster::new([
            at(0, 0, "tcp:10.1.0.1:4000"),
            at(1, 1, "tcp:10.1.0.2:4000"),
            at(2, 1, "tcp:10.1.0.2:4001"),
            at(3, 8, "tcp:[fd00::3]:4000"),
        ]);
        assert_eq!(place(&roster, "tcp:10.1.0.1:4002"), (0, 4));
        assert_eq!(place(&roster, "tcp:10.1.0.2:4002"), (1, 4));
        assert_eq!(place(&roster, "tcp:[fd00::3]:4001"), (8, 4));
        assert_eq!(place(&roster, "tcp:10.1.0.3:4000"), (9, 4), "a host of its own");
        let here = Roster::new([at(0, 0, "tcp:127.0.0.1:4000")]);
        assert_eq!(place(&here, "tcp:127.0.0.1:4001"), (0, 1));
        let shared = Roster::new([at(0, 3, "shm:aa"), at(1, 3, "shm:bb")]);
        assert_eq!(place(&shared, "shm:cc"), (3, 2));
        let mixed = Roster::new([at(0, 0, "host:0-0 shm:aa tcp:10.1.0.1:4000")]);
        assert_eq!(place(&mixed, "host:7-0 shm:bb tcp:10.1.0.1:4001"), (7, 1), "as its address says");
        let shown = |address: &str| at(0, 3, address).host_shown();
        assert_eq!(shown("tcp:10.1.0.1:4000"), "10.1.0.1");
        assert_eq!(shown("shm:aa tcp:10.1.0.2:4000"), "10.1.0.2");
        assert_eq!([shown("tcp:127.0.0.1:4000"), shown("shm:aa")], ["3", "3"]);
    }

    #[test]
    fn a_roster_survives_the_wire_and_cut_ones_are_refused() {
        let neighbour = |seat: u32| {
            let address = Address(format!("127.0.0.1:{}", 4000 + seat));
            Neighbour::new(Process::new(seat, u64::from(seat) << 40 | 7), 3, 2, address)
        };
        let roster = Roster::new([0, 3, 5].map(neighbour));
        let bytes = roster.encode();
        let decoded = Roster::decode(&bytes).expect("is whole");
        assert!(decoded.iter().eq(roster.iter()));
        for end in 0..bytes.len() {
            assert!(Roster::decode(&bytes[..end]).is_err());
        }
    }
}
