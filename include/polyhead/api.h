/* POLYHEAD_API marks what the shared library exports; everything else is hidden. C and C++. */
#ifndef POLYHEAD_API_H
#define POLYHEAD_API_H

#if defined(__GNUC__)
#define POLYHEAD_API __attribute__((visibility("default")))
#else
#define POLYHEAD_API
#endif

#endif
