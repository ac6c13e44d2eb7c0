/*
 * Pin, copy, evict, restore and invalidate, with a disk below and the power going once.
 *
 * The smallest house in which everything meets: one slot in each of three tiers, so that all want
 * the same room, and three blocks: key A before the invalidation, key A after it, and key B of a
 * space that is never invalidated. Readers, a mover, an evictor, a writer whose process may die
 * while it can still write, an invalidator, and the power. What is atomic here is what is done
 * under the engine's lock; every copy of bytes, sync and commit is a step of its own, so that all
 * else comes between.
 *
 * Laws, as assertions and two claims at the end: a pinned copy is neither dropped nor overwritten; a hold keeps some copy; visible means
 * whole; a slot has one owner; no reference is lost; what was invalidated never comes back, not
 * after a crash either; a record never names bytes that are not there.
 *
 * -DBUG=1 to 12 plants one breach each, and the model must find it: see run.sh.
 */
#ifndef BUG
#define BUG 0
#endif
#ifndef READERS
#define READERS 2
#endif

#define DEVICE 0
#define HOST 1
#define DISK 2

#define A_OLD 0 /* key A, generation 0 */
#define A_NEW 1 /* key A, generation 1 */
#define OTHER 2 /* key B */

/* Bytes in a slot: nothing, half of something, or a block's, whole. */
#define NOTHING 0
#define TORN 1
#define WHOLE(block) ((block) + 2)

/* ---- memory: gone with the power ---- */
byte claims[3]; /* of each tier's slot: who thinks that it is his. More than one is a breach */
byte bytes[3];  /* DISK's outlive the power */
bool writing[3];
bool sealed[3];
byte holds[3];
byte transfers[3];
typedef by_tier {
    bool copy[3];
    byte pins[3]
};
by_tier lies[3];
bit generation; /* of key A */

/* ---- disk ---- */
bool durable = true; /* what was written last would outlive the power */
byte record;         /* block + 1 that a committed record names; 0: none */
bit generation_on_disk;

/* ---- the model's own ---- */
bool answered;    /* the invalidation was answered */
bool stale_found; /* a look-up found A_OLD after it */
bool down;        /* no power */
bool quit;        /* all go home when they are done with what they do */
byte stopped;
byte home;
bool reading[2];
#define WORKERS (READERS + 3)

#define current(i) ((i) == OTHER || ((i) == A_OLD && generation == 0) || ((i) == A_NEW && generation == 1))
#define copies(i) (lies[i].copy[DEVICE] + lies[i].copy[HOST] + lies[i].copy[DISK])
#define findable(i) (sealed[i] && current(i))

inline take(t)
{
    claims[t]++;
    assert(claims[t] == 1) /* a slot has one owner */
}

inline give(t)
{
    assert(claims[t] == 1);
    claims[t]--;
    if
    :: t != DISK -> bytes[t] = NOTHING
    :: else -> skip /* bytes stay on a disk until they are overwritten */
    fi
}

/* A copy goes. */
inline drop(i, t)
{
    assert(lies[i].pins[t] == 0);                   /* a pinned copy is not dropped */
    assert(holds[i] == 0 || copies(i) > 1);       /* a hold keeps some copy */
    lies[i].copy[t] = false;
    if
    :: copies(i) == 0 -> sealed[i] = false
    :: else -> skip
    fi
}

/* What nobody holds and nobody can find goes; the disk's part is the evictor's. */
inline settle(i)
{
    if
    :: holds[i] == 0 && transfers[i] == 0 && sealed[i] && !current(i) ->
        if
        :: lies[i].copy[DEVICE] -> drop(i, DEVICE); give(DEVICE)
        :: else -> skip
        fi;
        if
        :: lies[i].copy[HOST] -> drop(i, HOST); give(HOST)
        :: else -> skip
        fi
    :: else -> skip
    fi
}

inline any_block(i)
{
    if
    :: i = A_OLD
    :: i = A_NEW
    :: i = OTHER
    fi
}

proctype reader(byte me)
{
    byte i, t;
idle:
    {
        do
        :: atomic {
            !quit ->
            any_block(i);
            if
            :: findable(i) && copies(i) > 0 -> skip
            :: else -> i = 0; goto idle
            fi;
            if
            :: i == A_OLD && answered -> stale_found = true
            :: else -> skip
            fi;
            holds[i]++;
            reading[me] = true
            }
            atomic {
            if /* the hold keeps some copy, wherever it went meanwhile */
            :: lies[i].copy[DEVICE] -> t = DEVICE
            :: lies[i].copy[HOST] -> t = HOST
            :: else ->
                assert(lies[i].copy[DISK]);
                holds[i]--;
                reading[me] = false;
                settle(i);
                i = 0;
                goto idle
            fi;
            lies[i].pins[t]++
            }
            /* Without the lock: the pin is the whole promise. */
#if BUG == 12
            claims[DISK] == 0;
#endif
            atomic {
                assert(bytes[t] == WHOLE(i)); /* visible means whole, and nobody overwrites it */
                lies[i].pins[t]--;
                holds[i]--;
                reading[me] = false;
                settle(i);
                i = 0;
                t = 0
            }
        :: atomic { quit -> goto away }
        od
    } unless { down };
    atomic { stopped++; reading[me] = false; i = 0; t = 0 }
    atomic { !down -> stopped-- }
    goto idle;
away:
    home++
}

proctype mover()
{
    byte i, s, t;
    bool well;
idle:
    {
        do
        :: atomic {
            !quit ->
            any_block(i);
            if
            :: sealed[i] && lies[i].copy[DEVICE] -> s = DEVICE
            :: sealed[i] && lies[i].copy[HOST] -> s = HOST
            :: sealed[i] && lies[i].copy[DISK] -> s = DISK
            :: else -> i = 0; goto idle
            fi;
            if
            :: t = DEVICE
            :: t = HOST
            :: t = DISK
            fi;
            if
            :: t != s && !lies[i].copy[t] && current(i) && (claims[t] == 0 || (BUG == 5 && t == HOST)) -> skip
            :: else -> i = 0; s = 0; t = 0; goto idle
            fi;
            take(t);
            holds[i]++;
            lies[i].pins[s]++;
            transfers[i]++;
#if BUG == 3
            lies[i].copy[t] = true;
#endif
            }
            bytes[t] = TORN;
            if
            :: t == DISK ->
#if BUG == 7
                record = i + 1;
#endif
                atomic { durable = false; bytes[DISK] = bytes[s] }
                durable = true;
                record = i + 1;
                well = true
            :: t != DISK -> atomic { bytes[t] = bytes[s]; well = true }
            :: t != DISK -> well = false /* the copy failed: half of it is there */
            fi;
            atomic {
                assert(bytes[s] == WHOLE(i)); /* what was copied is still what was pinned */
                transfers[i]--;
                holds[i]--;
#if BUG == 6
                if
                :: well -> lies[i].pins[s]--
                :: else -> skip
                fi;
#else
                lies[i].pins[s]--;
#endif
                if
                :: (well || BUG == 4) && current(i) -> lies[i].copy[t] = true
                :: (well || BUG == 4) && !current(i) && t == DISK ->
                    lies[i].copy[t] = true /* its record is there: the evictor's to remove */
                :: else -> lies[i].copy[t] = false; give(t)
                fi;
                settle(i);
                i = 0;
                s = 0;
                t = 0;
                well = false
            }
        :: atomic { quit -> goto away }
        od
    } unless { down };
    atomic { stopped++; i = 0; s = 0; t = 0; well = false }
    atomic { !down -> stopped-- }
    goto idle;
away:
    home++
}

proctype evictor()
{
    byte i, t;
idle:
    {
        do
        :: atomic {
            !quit ->
            any_block(i);
            if
            :: t = DEVICE
            :: t = HOST
            :: t = DISK
            fi;
            if
            :: lies[i].copy[t] && transfers[i] == 0 && (lies[i].pins[t] == 0 || BUG == 1) &&
                   (holds[i] == 0 || copies(i) > 1 || BUG == 2) -> skip
            :: else -> i = 0; t = 0; goto idle
            fi;
            if
            :: t != DISK -> drop(i, t); give(t); i = 0; t = 0; goto idle
            :: else -> drop(i, t)
            fi
#if BUG == 8
            ;
            give(DISK)
#endif
            }
            record = 0; /* committed */
#if BUG != 8
            atomic { give(DISK); i = 0; t = 0 }
#endif
        :: atomic { quit -> goto away }
        od
    } unless { down };
    atomic { stopped++; i = 0; t = 0 }
    atomic { !down -> stopped-- }
    goto idle;
away:
    home++
}

proctype writer()
{
    byte i, t;
idle:
    {
        do
        :: atomic {
            !quit ->
            any_block(i);
            if
            :: t = DEVICE
            :: t = HOST
            fi;
            if
            :: current(i) && !sealed[i] && copies(i) == 0 && claims[t] == 0 -> skip
            :: else -> i = 0; t = 0; goto idle
            fi;
            take(t);
            writing[i] = true
            }
            bytes[t] = TORN;
            if
            :: bytes[t] = WHOLE(i);
                atomic {
                    writing[i] = false;
                    if
                    :: current(i) -> sealed[i] = true; lies[i].copy[t] = true
                    :: else -> give(t)
                    fi;
                    i = 0;
                    t = 0
                }
            :: atomic { /* its connection is lost, its process still lives */
                writing[i] = false
#if BUG == 9
                ;
                give(t)
#endif
                }
                bytes[t] = TORN; /* and writes what it had begun */
#if BUG != 9
                atomic { give(t); i = 0; t = 0 } /* the process is gone */
#endif
            fi
        :: atomic { quit -> goto away }
        od
    } unless { down };
    atomic { stopped++; i = 0; t = 0 }
    atomic { !down -> stopped-- }
    goto idle;
away:
    home++
}

/* Once, at any time; not when the power is away, and it goes home by itself. */
proctype invalidator()
{
    byte i;
    if
    :: atomic { !down && !quit ->
#if BUG == 11
        answered = true;
#endif
#if BUG != 10
        generation_on_disk = 1;
#else
        skip;
#endif
        }
        if
        :: atomic { !down ->
            generation = 1;
            i = A_OLD;
            settle(i);
            answered = true
            }
        :: atomic { down -> !down } /* the call failed, and whatever was durable is */
        fi
    :: quit
    fi
}

/* The power goes once, or never; then the day ends. */
proctype power()
{
    byte i, t;
    if
    :: atomic { !quit -> down = true }
        stopped == WORKERS;
        atomic {
            for (i : 0 .. 2) {
                writing[i] = false;
                sealed[i] = false;
                holds[i] = 0;
                transfers[i] = 0;
                for (t : 0 .. 2) {
                    lies[i].copy[t] = false;
                    lies[i].pins[t] = 0
                }
            }
            claims[DEVICE] = 0;
            claims[HOST] = 0;
            claims[DISK] = 0;
            bytes[DEVICE] = NOTHING;
            bytes[HOST] = NOTHING;
            if
            :: !durable -> bytes[DISK] = TORN; durable = true
            :: else -> skip
            fi;
            generation = generation_on_disk;
            if
            :: record != 0 ->
                i = record - 1;
                if
                :: current(i) ->
                    assert(bytes[DISK] == WHOLE(i)); /* a record names what is there */
                    assert(!(i == A_OLD && answered));
                    take(DISK);
                    sealed[i] = true;
                    lies[i].copy[DISK] = true
                :: else -> record = 0
                fi
            :: else -> skip
            fi;
            i = 0;
            t = 0;
            down = false
        }
    :: skip
    fi;
    stopped == 0;
    quit = true;
    home == WORKERS;
    /* Nobody is at work: no reference is left, and each slot is free or one copy's. */
    atomic {
        for (i : 0 .. 2) {
            assert(holds[i] == 0);
            assert(transfers[i] == 0);
            for (t : 0 .. 2) {
                assert(lies[i].pins[t] == 0);
                assert(!lies[i].copy[t] || t == DISK || bytes[t] == WHOLE(i))
            }
        }
        for (t : 0 .. 2) {
            assert(claims[t] == lies[A_OLD].copy[t] + lies[A_NEW].copy[t] + lies[OTHER].copy[t])
        }
    }
}

init
{
    atomic {
        run reader(0);
#if READERS > 1
        run reader(1);
#endif
        run mover();
        run evictor();
        run writer();
        run invalidator();
        run power()
    }
}

/* After the answer of an invalidation no look-up finds what was invalidated. */
ltl never_found_again { [] (answered -> [] !stale_found) }

/* Whoever reads comes to an end. */
ltl reading_ends { [] (reading[0] -> <> !reading[0]) }
