//! Where the places of a run are: in the caller's slices, in scratch, at a peer.

use pleach_schedule::Part;
use pleach_transport::{MapError, Mapped, RegionKey, RemoteSlice, Slice, Space};
use pleach_vocabulary::Rank;

use super::address::Address;
use super::bytes::Bytes;
use super::ground::Ground;
use super::header::Landing;
use super::plan::Plan;
use super::program::{NO_SLOT, PlaceAt, PutProgram};
use super::run::{Parameters, Run, Site, Trouble};

impl Run {
    /// The registered bytes to put: in place, or copied to the bounce slot first, unless who
    /// computes has done so.
    pub(super) fn source(&self, ground: &Ground<'_>, site: Site<'_>, put: &PutProgram) -> Slice {
        let bytes = site.bytes();
        let slice = match self.registered(put) {
            Some(Bytes::Registered(slice)) => Some(slice.clone()),
            Some(Bytes::Lent(slice)) => Some(slice.hold()),
            _ => None,
        };
        if let Some(slice) = slice {
            let start = offset(site, put.src);
            return slice.slice(start..start + bytes).expect("lengths were checked when the run began");
        }
        let slice = self.bounce_slot(ground, site, if self.bounces(put) { put.bounce } else { put.src.slot });
        if self.bounces(put) && ground.compute.space() == Space::Host {
            let from = self.local(ground.scratch, site, put.src);
            from.copy_to(Address(slice.as_ptr()), bytes);
        }
        slice
    }

    /// The caller's bytes that are put, where it is some of them.
    fn registered(&self, put: &PutProgram) -> Option<&Bytes> {
        match put.src.part {
            Part::Input | Part::SharedInput => Some(&self.parameters.input),
            Part::Output | Part::SharedOutput => Some(&self.parameters.output),
            Part::Scratch(_) => None,
        }
    }

    /// Whether what is put has to be copied to a slot of scratch first.
    pub(super) fn bounces(&self, put: &PutProgram) -> bool {
        put.bounce != NO_SLOT && !self.registered(put).is_some_and(Bytes::is_registered)
    }

    /// The chunk's instance of a slot of this rank's scratch.
    pub(super) fn bounce_slot(&self, ground: &Ground<'_>, site: Site<'_>, slot: u32) -> Slice {
        let start = (self.parameters.bank.scratch_base + slot_offset(site, slot)) as usize;
        ground.scratch.slice(start..start + site.bytes()).expect("the bank has room for every slot")
    }

    /// Address of a place of this rank.
    pub(super) fn local(&self, scratch: &Slice, site: Site<'_>, place: PlaceAt) -> Address {
        let Parameters { input, output, .. } = &self.parameters;
        let own = match place.part {
            Part::Input => Some(input),
            Part::Output => Some(output),
            // When data travel in signal slots nobody else touches the shared parts.
            Part::SharedInput => (site.plan.inline || input.is_registered()).then_some(input),
            Part::SharedOutput => (site.plan.inline || output.is_registered()).then_some(output),
            Part::Scratch(_) => None,
        };
        if let Some(own) = own {
            return own.base().add(offset(site, place));
        }
        let offset = self.parameters.bank.scratch_base + slot_offset(site, place.slot);
        Address(scratch.as_ptr()).add(offset as usize)
    }

    /// Name of a place of a peer.
    pub(super) fn remote(
        &self,
        ground: &Ground<'_>,
        site: Site<'_>,
        place: PlaceAt,
        len: u64,
    ) -> RemoteSlice {
        let peer = &self.peers[place.rank as usize];
        let landing = match place.part {
            Part::SharedInput => peer.input,
            Part::SharedOutput => peer.output,
            _ => Landing::default(),
        };
        if landing.key != RegionKey::NONE {
            // A sum that a peer's number makes too large lies in no region, and the owner refuses
            // it.
            let offset = landing.offset.saturating_add(offset(site, place) as u64);
            return RemoteSlice { key: landing.key, offset, len };
        }
        let scratch = &ground.peer_scratch[place.rank as usize];
        let place = self.parameters.bank.peer_scratch_base + slot_offset(site, place.slot);
        let offset = scratch.offset.saturating_add(place);
        RemoteSlice { key: scratch.key, offset, len }
    }

    /// Whether the place of a peer may be touched yet: its slice once it said where that is, its
    /// scratch once it does not use that for an earlier run any more.
    pub(super) fn is_within_reach(&self, plan: &Plan, ground: &mut Ground<'_>, place: PlaceAt) -> bool {
        match place.part {
            Part::SharedInput | Part::SharedOutput => plan.inline || self.peers[place.rank as usize].heard,
            _ => self.may_write(plan, ground, place.rank),
        }
    }

    /// Address of any place; `None`: not within reach yet.
    pub(super) fn reach(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        place: PlaceAt,
    ) -> Result<Option<Address>, Trouble> {
        if place.rank == site.plan.program.rank {
            Ok(Some(self.local(ground.scratch, site, place)))
        } else {
            self.mapped(ground, site, place)
        }
    }

    /// Address of a place of a peer through a mapping; `None`: not within reach or not mapped yet,
    /// try again.
    pub(super) fn mapped(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        place: PlaceAt,
    ) -> Result<Option<Address>, Trouble> {
        if !self.is_within_reach(site.plan, ground, place) {
            return Ok(None);
        }
        // Everything of one landing is mapped at once: chunk 0 of block 0 is not where it begins,
        // its slice is.
        let whole = self.peer_whole(ground, site, place);
        let peer = &mut self.peers[place.rank as usize];
        let (mapped, is_landing) = match place.part {
            Part::SharedInput if peer.input.key != RegionKey::NONE => (&mut peer.input_mapped, true),
            Part::SharedOutput if peer.output.key != RegionKey::NONE => (&mut peer.output_mapped, true),
            _ => (&mut peer.scratch_mapped, false),
        };
        if mapped.is_none() {
            match ground.device.map(place.rank, &whole) {
                Ok(new) => {
                    assert!(new.len() as u64 >= whole.len, "{new:?} was made of {whole:?}");
                    if !new.is_on_host() && ground.compute.space() == Space::Host {
                        let error = MapError::OnGpu { peer: place.rank, key: whole.key };
                        return Err(Trouble::Map { peer: place.rank, error });
                    }
                    *mapped = Some(new);
                }
                // Gone: its own event says how.
                Err(MapError::Unknown { .. } | MapError::Disconnected { .. }) => return Ok(None),
                Err(error) => return Err(Trouble::Map { peer: place.rank, error }),
            }
            if !peer.heard {
                self.touched.push(place.rank);
            }
        }
        if !mapped.as_ref().is_some_and(Mapped::is_shared) {
            // Its owner has severed somebody: its own word, or its end, says why.
            return Ok(None);
        }
        let base = Address(mapped.as_ref().map_or(std::ptr::null_mut(), Mapped::as_ptr));
        Ok(Some(if is_landing {
            base.add(offset(site, place))
        } else {
            base.add((self.parameters.bank.peer_scratch_base + slot_offset(site, place.slot)) as usize)
        }))
    }

    /// Whether all bytes that were read at these places were still those of the ranks that keep
    /// them; see [`Mapped::is_shared`].
    pub(super) fn are_shared(&self, rank: Rank, places: &[PlaceAt]) -> bool {
        places.iter().filter(|place| place.rank != rank).all(|place| {
            let peer = &self.peers[place.rank as usize];
            let mapped = match place.part {
                Part::SharedInput if peer.input.key != RegionKey::NONE => &peer.input_mapped,
                Part::SharedOutput if peer.output.key != RegionKey::NONE => &peer.output_mapped,
                _ => &peer.scratch_mapped,
            };
            mapped.as_ref().is_some_and(Mapped::is_shared)
        })
    }

    /// All of a peer's slice (or scratch) that holds the place.
    pub(super) fn peer_whole(&self, ground: &Ground<'_>, site: Site<'_>, place: PlaceAt) -> RemoteSlice {
        let peer = &self.peers[place.rank as usize];
        let landing = match place.part {
            Part::SharedInput => peer.input,
            Part::SharedOutput => peer.output,
            _ => Landing::default(),
        };
        if landing.key == RegionKey::NONE {
            return ground.peer_scratch[place.rank as usize];
        }
        let len = site.plan.layout.landing_bytes(&site.plan.program, site.lane.block, place) as u64;
        RemoteSlice { key: landing.key, offset: landing.offset, len }
    }
}

/// Where the chunk begins in the input or output of the place's rank, in bytes.
fn offset(site: Site<'_>, place: PlaceAt) -> usize {
    site.plan.layout.offset(&site.plan.program, site.lane.block, site.chunk, place)
}

/// Where the chunk's instance of a slot begins in its bank, in bytes.
fn slot_offset(site: Site<'_>, slot: u32) -> u64 {
    let program = &site.plan.program;
    let size = program.blocks[site.lane.block as usize].size;
    u64::from(slot * program.window + site.at.slot * size) * site.plan.unit_bytes as u64
}
