//! Assigns steps to thread blocks and channels.
//!
//! One thread block at each end uses a connection (two GPUs, one direction, one channel). A step
//! that receives and sends ties the two transfers to one channel, so steps form *channel groups*.
//! Each group takes the lowest channel on which the ends that it needs are free or belong to thread
//! blocks with the same peers. If sharing makes thread blocks wait for each other in a cycle, every
//! block of the data gets channels of its own.

use std::collections::{BTreeMap, BTreeSet};

use pleach_vocabulary::Rank;

use super::error::ExportError;
use super::import::StepOrder;
use super::{
    Algorithm, Buffer, Gpu, Instruction, InstructionKind, MAX_CHANNEL_PEERS, MAX_CHANNELS, MAX_STEPS,
    MAX_THREAD_BLOCKS, ThreadBlock,
};
use super::{BlockMemory, Places, UnplacedStep};

/// Which channel groups may share the ends of connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// All that fit.
    All,
    /// Those of one block of the data.
    OfBlock,
    /// None.
    Nothing,
}

/// The GPUs with their thread blocks, and how many channels these use.
pub(super) fn thread_blocks(
    ranks: u32,
    unplaced_steps: &[UnplacedStep],
    places: &Places,
) -> Result<(Vec<Gpu>, u32), ExportError> {
    for sharing in [Sharing::All, Sharing::OfBlock] {
        let (gpus, channels, is_in_order) = assigned(ranks, unplaced_steps, places, sharing)?;
        if is_in_order && !is_circular(&gpus) {
            return Ok((gpus, channels));
        }
    }
    let (gpus, channels, _) = assigned(ranks, unplaced_steps, places, Sharing::Nothing)?;
    Ok((gpus, channels))
}

fn is_circular(gpus: &[Gpu]) -> bool {
    let algorithm = Algorithm {
        name: String::new(),
        collective: String::new(),
        root: None,
        channels: 0,
        chunks: 0,
        in_place: true,
        out_of_place: true,
        gpus: gpus.to_vec(),
    };
    StepOrder::of(&algorithm).is_err()
}

/// Says also whether what is sent on each connection is received in that order.
fn assigned(
    ranks: u32,
    unplaced_steps: &[UnplacedStep],
    places: &Places,
    sharing: Sharing,
) -> Result<(Vec<Gpu>, u32, bool), ExportError> {
    let mut ends = ConnectionOwners::default();
    let of_draft = ends.channels(unplaced_steps, sharing)?;
    let mut gpus = Vec::with_capacity(ranks as usize);
    let mut drafts_of: Vec<Vec<usize>> = vec![Vec::new(); ranks as usize];
    (0..unplaced_steps.len())
        .for_each(|unplaced_step| drafts_of[unplaced_steps[unplaced_step].rank as usize].push(unplaced_step));
    // By connection: what is sent, and what is received.
    let mut order: BTreeMap<(u32, Rank, Rank), [Vec<usize>; 2]> = BTreeMap::new();
    for (rank, mut own) in drafts_of.into_iter().enumerate() {
        own.sort_by_key(|&unplaced_step| {
            (unplaced_steps[unplaced_step].level, unplaced_steps[unplaced_step].block, unplaced_step)
        });
        let rank = rank as Rank;
        let blocks = ends.blocks.remove(&rank).unwrap_or_default();
        for &unplaced_step in &own {
            let UnplacedStep { send, receive, .. } = &unplaced_steps[unplaced_step];
            let Some(channel) = of_draft[unplaced_step].map(|block| blocks[block].channel) else { continue };
            if let Some((transfer, peer)) = *send {
                order.entry((channel, rank, peer)).or_default()[0].push(transfer);
            }
            if let Some((transfer, peer)) = *receive {
                order.entry((channel, peer, rank)).or_default()[1].push(transfer);
            }
        }
        gpus.push(Placement { unplaced_steps, places, of_draft: &of_draft }.gpu(blocks, &own));
    }
    let channels = gpus.iter().flat_map(|gpu| &gpu.blocks).map(|block| block.channel + 1).max().unwrap_or(1);
    check(&gpus)?;
    Ok((gpus, channels, order.values().all(|[sent, received]| sent == received)))
}

fn check(gpus: &[Gpu]) -> Result<(), ExportError> {
    let at_most = |what, needed: usize, most: u32| {
        let (needed, most) = (needed as u64, u64::from(most));
        if needed > most { Err(ExportError::TooMany { what, needed, most }) } else { Ok(()) }
    };
    for gpu in gpus {
        at_most("thread blocks of a GPU", gpu.blocks.len(), MAX_THREAD_BLOCKS)?;
        let mut peers: BTreeMap<u32, [usize; 2]> = BTreeMap::new();
        for block in &gpu.blocks {
            at_most("steps of a thread block", block.steps.len(), MAX_STEPS)?;
            let of_channel = peers.entry(block.channel).or_default();
            of_channel[0] += usize::from(block.send.is_some());
            of_channel[1] += usize::from(block.receive.is_some());
            at_most("peers on a channel", of_channel[0].max(of_channel[1]), MAX_CHANNEL_PEERS)?;
        }
    }
    Ok(())
}

/// Whose thread block has which end of a connection.
#[derive(Default)]
struct ConnectionOwners {
    blocks: BTreeMap<Rank, Vec<ThreadBlock>>,
    /// The first group of a channel, by the block of the data that it is for.
    owners: BTreeMap<u32, u32>,
}

impl ConnectionOwners {
    /// The thread block of every draft that sends or receives.
    fn channels(
        &mut self,
        unplaced_steps: &[UnplacedStep],
        sharing: Sharing,
    ) -> Result<Vec<Option<usize>>, ExportError> {
        let mut of_draft = vec![None; unplaced_steps.len()];
        for group in channel_groups(unplaced_steps) {
            let block = unplaced_steps[group[0]].block;
            let is_free = |channel: &u32| match (self.owners.get(channel), sharing) {
                (None, _) | (_, Sharing::All) => true,
                (Some(&owner), Sharing::OfBlock) => owner == block,
                (Some(_), Sharing::Nothing) => false,
            };
            let fitting = (0..MAX_CHANNELS)
                .filter(is_free)
                .find_map(|channel| Some((channel, self.placed(unplaced_steps, &group, channel)?)));
            let Some((channel, placed)) = fitting else {
                let (needed, most) = (u64::from(MAX_CHANNELS) + 1, u64::from(MAX_CHANNELS));
                return Err(ExportError::TooMany { what: "or more channels", needed, most });
            };
            self.owners.insert(channel, block);
            for (rank, blocks) in placed.blocks {
                self.blocks.insert(rank, blocks);
            }
            for (unplaced_step, block) in placed.of_draft {
                of_draft[unplaced_step] = Some(block);
            }
        }
        Ok(of_draft)
    }

    /// The thread blocks with a group on this channel; `None` if an end is taken.
    fn placed(&self, unplaced_steps: &[UnplacedStep], group: &[usize], channel: u32) -> Option<Placed> {
        let mut placed = Placed { blocks: BTreeMap::new(), of_draft: Vec::with_capacity(group.len()) };
        for &index in group {
            let UnplacedStep { rank, send, receive, .. } = &unplaced_steps[index];
            let (send, receive) = (send.map(|(_, peer)| peer), receive.map(|(_, peer)| peer));
            let known = || self.blocks.get(rank).cloned().unwrap_or_default();
            let blocks = placed.blocks.entry(*rank).or_insert_with(known);
            let on_channel = |block: &&mut ThreadBlock| block.channel == channel;
            let mut holders: Vec<usize> = Vec::new();
            for (number, block) in blocks.iter_mut().enumerate().filter(|(_, block)| on_channel(block)) {
                let holds_send = send.is_some() && block.send == send;
                let holds_receive = receive.is_some() && block.receive == receive;
                if holds_send || holds_receive {
                    holders.push(number);
                }
            }
            let number = match holders.as_slice() {
                [] => {
                    blocks.push(ThreadBlock { send, receive, channel, line: 0, steps: Vec::new() });
                    blocks.len() - 1
                }
                [only] => {
                    let block = &mut blocks[*only];
                    for (end, wanted) in [(&mut block.send, send), (&mut block.receive, receive)] {
                        match (*end, wanted) {
                            (Some(peer), Some(wanted)) if peer != wanted => return None,
                            (None, Some(_)) => *end = wanted,
                            _ => {}
                        }
                    }
                    *only
                }
                _ => return None,
            };
            placed.of_draft.push((index, number));
        }
        Some(placed)
    }
}

struct Placed {
    blocks: BTreeMap<Rank, Vec<ThreadBlock>>,
    of_draft: Vec<(usize, usize)>,
}

/// Drafts that must be on one channel, those that are needed first at the front.
fn channel_groups(unplaced_steps: &[UnplacedStep]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..unplaced_steps.len())
        .filter(|&unplaced_step| {
            unplaced_steps[unplaced_step].send.is_some() || unplaced_steps[unplaced_step].receive.is_some()
        })
        .collect();
    order.sort_by_key(|&unplaced_step| {
        (unplaced_steps[unplaced_step].block, unplaced_steps[unplaced_step].level, unplaced_step)
    });
    let transfers = order
        .iter()
        .filter_map(|&unplaced_step| unplaced_steps[unplaced_step].send.map(|(transfer, _)| transfer + 1))
        .max()
        .unwrap_or(0);
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); transfers];
    for &unplaced_step in &order {
        for &(transfer, _) in
            unplaced_steps[unplaced_step].send.iter().chain(&unplaced_steps[unplaced_step].receive)
        {
            users[transfer].push(unplaced_step);
        }
    }
    let mut is_taken = vec![false; unplaced_steps.len()];
    let mut channel_groups = Vec::new();
    for &start in &order {
        if is_taken[start] {
            continue;
        }
        is_taken[start] = true;
        let (mut group, mut left) = (Vec::new(), vec![start]);
        while let Some(unplaced_step) = left.pop() {
            group.push(unplaced_step);
            for (transfer, _) in
                unplaced_steps[unplaced_step].send.iter().chain(&unplaced_steps[unplaced_step].receive)
            {
                for &user in &users[*transfer] {
                    if !std::mem::replace(&mut is_taken[user], true) {
                        left.push(user);
                    }
                }
            }
        }
        channel_groups.push(group);
    }
    channel_groups
}

/// The steps of a GPU in its thread blocks.
struct Placement<'a> {
    unplaced_steps: &'a [UnplacedStep],
    places: &'a Places,
    of_draft: &'a [Option<usize>],
}

/// A memory of a GPU for a block of the data; input and output may be one.
type Location = (u32, BlockMemory);

/// Who has touched it.
#[derive(Default)]
struct PlaceAccesses {
    write: Option<usize>,
    reads: Vec<usize>,
}

impl Placement<'_> {
    fn gpu(&self, mut blocks: Vec<ThreadBlock>, own: &[usize]) -> Gpu {
        let mut gpu = self.places.gpu();
        let mut scratch: BTreeMap<Location, u32> = BTreeMap::new();
        let mut accesses: BTreeMap<Location, PlaceAccesses> = BTreeMap::new();
        let mut block_of: BTreeMap<usize, usize> = BTreeMap::new();
        let mut local = None;
        // By thread block: its drafts, each with the drafts of other blocks that it comes after.
        let mut lists: Vec<Vec<(usize, Vec<usize>)>> = vec![Vec::new(); blocks.len()];
        for &unplaced_step in own {
            let earlier = self.conflicts(unplaced_step, &mut accesses);
            let block = self.of_draft[unplaced_step]
                .or_else(|| earlier.iter().next_back().map(|earlier| block_of[earlier]));
            let block = block.unwrap_or_else(|| {
                *local.get_or_insert_with(|| {
                    blocks.push(ThreadBlock {
                        send: None,
                        receive: None,
                        channel: 0,
                        line: 0,
                        steps: Vec::new(),
                    });
                    lists.push(Vec::new());
                    blocks.len() - 1
                })
            });
            block_of.insert(unplaced_step, block);
            let elsewhere = earlier.into_iter().filter(|earlier| block_of[earlier] != block).collect();
            lists[block].push((unplaced_step, elsewhere));
        }
        let position: BTreeMap<usize, (usize, usize)> = lists
            .iter()
            .enumerate()
            .flat_map(|(block, list)| {
                list.iter()
                    .enumerate()
                    .map(move |(index, &(unplaced_step, _))| (unplaced_step, (block, index)))
            })
            .collect();
        let (needed, numbers) = numbered(&lists, &position);
        let is_waited_for: BTreeSet<usize> = needed.iter().flatten().flatten().copied().collect();
        for (block, list) in lists.iter().enumerate() {
            for (index, &(unplaced_step, _)) in list.iter().enumerate() {
                let after = |earlier: &usize| {
                    let (other, index) = position[earlier];
                    (other as u32, numbers[other][index])
                };
                let mut waits: Vec<(u32, u32)> = needed[block][index].iter().map(after).collect();
                let last = waits.pop();
                blocks[block].steps.extend(waits.into_iter().map(nothing));
                let mut step = self.instruction(unplaced_step, &mut scratch, &mut gpu.scratch_chunks);
                step.after = last;
                step.is_waited_for = is_waited_for.contains(&unplaced_step);
                blocks[block].steps.push(step);
            }
        }
        gpu.blocks = blocks;
        gpu
    }

    /// The earlier drafts of this GPU that must be over before one begins.
    fn conflicts(
        &self,
        unplaced_step: usize,
        accesses: &mut BTreeMap<Location, PlaceAccesses>,
    ) -> BTreeSet<usize> {
        let UnplacedStep { block, kind, source, target, .. } = self.unplaced_steps[unplaced_step];
        let at = |memory| (block, if memory == BlockMemory::Input { BlockMemory::Output } else { memory });
        let mut earlier = BTreeSet::new();
        let reads =
            [kind.reads_source().then_some(source), (kind == InstructionKind::Reduce).then_some(target)];
        for place in reads.into_iter().flatten() {
            let accesses = accesses.entry(at(place)).or_default();
            earlier.extend(accesses.write);
            accesses.reads.push(unplaced_step);
        }
        if kind.writes_target() {
            let accesses = accesses.entry(at(target)).or_default();
            earlier.extend(accesses.write.replace(unplaced_step));
            earlier.extend(accesses.reads.drain(..));
        }
        earlier.remove(&unplaced_step);
        earlier
    }

    fn instruction(
        &self,
        unplaced_step: usize,
        scratch: &mut BTreeMap<Location, u32>,
        chunks: &mut u32,
    ) -> Instruction {
        let UnplacedStep { block, kind, source, target, .. } = self.unplaced_steps[unplaced_step];
        let count = self.places.count(block);
        let mut place = |memory, is_used: bool| match memory {
            BlockMemory::Scratch(_) if is_used => {
                let first = *scratch.entry((block, memory)).or_insert_with(|| {
                    *chunks += count;
                    *chunks - count
                });
                (Buffer::Scratch, first)
            }
            BlockMemory::Scratch(_) => (Buffer::Scratch, 0),
            data => self.places.of_data(data, block),
        };
        let mut source_at = place(source, kind.reads_source());
        let mut target_at = place(target, kind.writes_target());
        // What is not used repeats what is, as in the runtimes' own files.
        if !kind.reads_source() {
            source_at = target_at;
        }
        if !kind.writes_target() {
            target_at = source_at;
        }
        Instruction {
            kind,
            source: source_at,
            target: target_at,
            count,
            after: None,
            is_waited_for: false,
            line: 0,
        }
    }
}

/// Of every draft those it has to wait for explicitly, at most one of each thread block; and every
/// draft's step number.
fn numbered(
    lists: &[Vec<(usize, Vec<usize>)>],
    position: &BTreeMap<usize, (usize, usize)>,
) -> (Vec<Vec<Vec<usize>>>, Vec<Vec<u32>>) {
    let mut needed = Vec::with_capacity(lists.len());
    let mut numbers = Vec::with_capacity(lists.len());
    for list in lists {
        let mut known: BTreeMap<usize, usize> = BTreeMap::new();
        let (mut of_list, mut next, mut of_drafts) = (Vec::new(), 0, Vec::new());
        for (_, earlier) in list {
            let mut latest: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for &unplaced_step in earlier {
                let (block, index) = position[&unplaced_step];
                if known.get(&block).is_none_or(|&known| known < index) {
                    known.insert(block, index);
                    latest.insert(block, (index, unplaced_step));
                }
            }
            let waits: Vec<usize> = latest.values().map(|&(_, unplaced_step)| unplaced_step).collect();
            next += waits.len().saturating_sub(1) as u32;
            of_drafts.push(next);
            next += 1;
            of_list.push(waits);
        }
        needed.push(of_list);
        numbers.push(of_drafts);
    }
    (needed, numbers)
}

/// Carries one more dependency of the step after it.
fn nothing(after: (u32, u32)) -> Instruction {
    Instruction {
        kind: InstructionKind::Nothing,
        source: (Buffer::Input, 0),
        target: (Buffer::Output, 0),
        count: 0,
        after: Some(after),
        is_waited_for: false,
        line: 0,
    }
}
